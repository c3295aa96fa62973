"""The official client, unchanged: chat, streams, tools, parsed answers, responses, embeddings."""

import json
import math
import sys
import time

import openai
from pydantic import BaseModel


class City(BaseModel):
    name: str
    capital: bool


URL, MODEL = sys.argv[1:3]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["unit", "days"],
            "additionalProperties": False,
        },
    },
}
ASK = [{"role": "user", "content": "What is the capital of Japan?"}]

client = openai.OpenAI(base_url=URL, api_key="none", max_retries=0, timeout=120)

whole = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=12)
assert "Tokyo" in whole.choices[0].message.content, whole
stream = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, max_tokens=12, stream=True)
text = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
assert text == whole.choices[0].message.content, text

for choice, reason in (("required", "tool_calls"), ({"type": "function", "function": {"name": "weather"}}, "stop")):
    answer = client.chat.completions.create(
        model=MODEL,
        messages=ASK,
        tools=[TOOL],
        tool_choice=choice,
        parallel_tool_calls=False,
        max_tokens=64,
        reasoning_effort="none",  # the template lets models think, and this one would for too long
    )
    (call,) = answer.choices[0].message.tool_calls
    assert (answer.choices[0].finish_reason, call.function.name) == (reason, "weather"), answer
    assert '"unit": "' in call.function.arguments, call
    results = [
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    again = client.chat.completions.create(model=MODEL, messages=[*ASK, *results], tools=[TOOL], max_tokens=4)
    assert again.usage.completion_tokens <= 4, again

parsed = client.chat.completions.parse(
    model=MODEL, messages=ASK, response_format=City, temperature=0, max_tokens=60, reasoning_effort="none"
)
assert isinstance(parsed.choices[0].message.parsed, City), parsed

response = client.responses.create(
    model=MODEL, input="What is the capital of Japan?", temperature=0, max_output_tokens=12
)
assert "Tokyo" in response.output_text, response
with client.responses.stream(
    model=MODEL, input="What is the capital of Japan?", temperature=0, max_output_tokens=12
) as events:
    kinds = [event.type for event in events]
    assert events.get_final_response().output_text == response.output_text
assert kinds[0] == "response.created", kinds
asked = {"model": MODEL, "temperature": 0, "max_output_tokens": 12}
next_turn = client.responses.create(input="And of France?", previous_response_id=response.id, **asked)
said = [{"role": "user", "content": "What is the capital of Japan?"}]
said += [item.model_dump(by_alias=True, exclude_none=True) for item in response.output]
same = client.responses.create(input=[*said, {"role": "user", "content": "And of France?"}], store=False, **asked)
assert (next_turn.output_text, next_turn.usage.input_tokens) == (same.output_text, same.usage.input_tokens), next_turn
assert next_turn.usage.input_tokens_details.cached_tokens >= 16, next_turn
assert client.responses.retrieve(response.id).output_text == response.output_text
assert len(client.responses.input_items.list(next_turn.id).data) == 3
client.responses.delete(response.id)
try:
    client.responses.create(input="And of Spain?", previous_response_id=next_turn.id, **asked)
except openai.BadRequestError as error:
    assert (error.code, error.param) == ("previous_response_not_found", "previous_response_id"), error
else:
    raise AssertionError("a conversation whose beginning was deleted goes on")
typed = client.responses.parse(
    model=MODEL,
    input="Tokyo",
    text_format=City,
    temperature=0,
    max_output_tokens=60,
    reasoning={"effort": "none"},
)
assert isinstance(typed.output_parsed, City), typed

vectors = [one.embedding for one in client.embeddings.create(model=MODEL, input=["a cat", "a kitten", "tax law"]).data]
assert all(abs(math.hypot(*vector) - 1) < 1e-4 for vector in vectors)
assert len(client.embeddings.create(model=MODEL, input="a cat", dimensions=64).data[0].embedding) == 64
assert [model.id for model in client.models.list()] == [MODEL]
try:
    client.chat.completions.create(model="other", messages=ASK)
except openai.NotFoundError as error:
    assert error.code == "model_not_found", error
else:
    raise AssertionError("another model is served")

ASKED = [
    ("chat", "/v1/chat/completions", {"messages": ASK, "temperature": 0, "max_tokens": 6}),
    ("embeddings", "/v1/embeddings", {"input": "a cat"}),
    ("long", "/v1/completions", {"prompt": "Once upon a time", "max_tokens": 90, "temperature": 0, "ignore_eos": True}),
]
for name, endpoint, body in ASKED:
    lines = [{"custom_id": name, "method": "POST", "url": endpoint, "body": {"model": MODEL, **body}}]
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=(f"{name}.jsonl", data), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h")
    if name == "long":  # it makes way for these, and goes on
        for _ in range(3):
            client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=4)
            time.sleep(0.7)
    while batch.status in ("validating", "in_progress", "finalizing"):
        time.sleep(0.2)
        batch = client.batches.retrieve(batch.id)
    assert (batch.status, batch.request_counts.completed) == ("completed", 1), batch
    [answer] = client.files.content(batch.output_file_id).text.splitlines()
    assert json.loads(answer)["response"]["status_code"] == 200, answer
    if name == "long":
        assert json.loads(answer)["response"]["body"]["usage"]["completion_tokens"] == 90, answer
