"""Instructor around the official client, unchanged: answers as pydantic models, in each of its modes that asks a server for
their shape, whole and as they come."""

import sys
from typing import Annotated, Literal

import instructor
import openai
from pydantic import BaseModel, Field

Short = Annotated[str, Field(max_length=16)]


class City(BaseModel, extra="forbid"):
    """A city."""

    name: Short
    size: Literal["small", "large"]
    districts: list[Short] = Field(max_length=2)
    capital: bool | None


URL, MODEL = sys.argv[1:3]
ASK = [{"role": "user", "content": "What is the capital of Japan?"}]
MODES = (instructor.Mode.TOOLS, instructor.Mode.TOOLS_STRICT, instructor.Mode.JSON_SCHEMA)

plain = openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=120)
for mode in MODES:
    client = instructor.from_openai(plain, mode=mode)
    asked = {"model": MODEL, "messages": ASK, "temperature": 0, "max_tokens": 200, "max_retries": 1}
    city, completion = client.chat.completions.create_with_completion(response_model=City, **asked)
    assert isinstance(city, City), (mode, city)
    assert completion.usage.completion_tokens <= 200, completion
    *_, last = client.create_partial(response_model=City, **asked)
    assert (last.name, last.size) == (city.name, city.size), (mode, last)
