"""LangChain's classes for OpenAI, unchanged: chat, streams, batches, tools, parsed answers, responses, embeddings."""

import asyncio
import math
import sys

import tiktoken
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from pydantic import BaseModel


class City(BaseModel):
    """A city."""

    name: str
    capital: bool


@tool
def weather(unit: str, days: int) -> str:
    """The weather in a city."""
    return f"sunny for {days} days, 20 {unit}"


URL, MODEL = sys.argv[1:3]
WHERE = {"base_url": URL, "api_key": "none", "max_retries": 0, "timeout": 120}
ASK = "What is the capital of Japan?"


def chat(**settings: object) -> ChatOpenAI:
    return ChatOpenAI(model=MODEL, **{"temperature": 0, "max_tokens": 12, **WHERE, **settings})


whole = chat().invoke(ASK)
assert "Tokyo" in whole.content, whole
assert whole.usage_metadata["output_tokens"] <= 12, whole
pieces = list(chat(stream_usage=True).stream([SystemMessage("Be brief."), HumanMessage(ASK)]))
assert len(pieces) > 3, pieces
joined = pieces[0]
for piece in pieces[1:]:
    joined += piece
assert "Tokyo" in joined.content, joined
assert joined.usage_metadata["input_tokens"] > 0, joined
assert [one.content for one in chat().batch([ASK, ASK])] == [whole.content] * 2
assert asyncio.run(chat().ainvoke(ASK)).content == whole.content
scored = chat(logprobs=True, top_logprobs=2).invoke(ASK)
assert len(scored.response_metadata["logprobs"]["content"][0]["top_logprobs"]) == 2, scored
several = chat(n=2, temperature=1, seed=1, stop=["\n"]).generate([[HumanMessage(ASK)]])
assert len(several.generations[0]) == 2, several

for choice in ("any", "weather"):
    bound = chat(max_tokens=64).bind_tools([weather], tool_choice=choice, parallel_tool_calls=False)
    called = bound.invoke(ASK)
    (call,) = called.tool_calls
    assert call["name"] == "weather", called
    assert isinstance(call["args"]["days"], int), called
    again = chat(max_tokens=4).bind_tools([weather])
    answer = again.invoke(
        [HumanMessage(ASK), called, ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])]
    )
    assert isinstance(answer, AIMessage), answer
    chunks = list(bound.stream(ASK))
    streamed = chunks[0]
    for chunk in chunks[1:]:
        streamed += chunk
    assert streamed.tool_calls[0]["args"] == call["args"], streamed

for method in ("json_schema", "function_calling"):
    for strict in (None, True):
        structured = chat(max_tokens=60).with_structured_output(City, method=method, strict=strict)
        assert isinstance(structured.invoke(f"{ASK} Answer in JSON."), City), (method, strict)
loose = chat(max_tokens=60).with_structured_output(None, method="json_mode").invoke(f"{ASK} Answer in JSON.")
assert isinstance(loose, dict), loose

responses = chat(use_responses_api=True)
first = responses.invoke(ASK)
assert "Tokyo" in first.text, first
assert "".join(piece.text for piece in responses.stream(ASK)) == first.text
second = responses.invoke([HumanMessage(ASK), first, HumanMessage("And of France?")])
assert second.text, second
called = chat(use_responses_api=True, max_tokens=64).bind_tools([weather], tool_choice="weather").invoke(ASK)
assert called.tool_calls[0]["name"] == "weather", called
results = [HumanMessage(ASK), called, ToolMessage("sunny", tool_call_id=called.tool_calls[0]["id"])]
assert chat(use_responses_api=True).bind_tools([weather]).invoke(results).usage_metadata, "results are taken"
parsed = chat(use_responses_api=True, max_tokens=60).with_structured_output(City).invoke(ASK)
assert isinstance(parsed, City), parsed

completed = OpenAI(model=MODEL, temperature=0, max_tokens=6, **WHERE)
assert "Tokyo" in completed.invoke("The capital of Japan is"), "text completion"
assert len(completed.generate(["The capital of Japan is", "One, two,"]).generations) == 2

# It makes tokens of texts with OpenAI's vocabularies, which it would download. Bytes are one that is always there.
tiktoken.registry.ENCODINGS["cl100k_base"] = tiktoken.Encoding(
    "cl100k_base",
    pat_str=r"(?s).",
    mergeable_ranks={bytes([byte]): byte for byte in range(256)},
    special_tokens={},
)
for own_tokens in (True, False):
    embeddings = OpenAIEmbeddings(model=MODEL, check_embedding_ctx_length=own_tokens, **WHERE)
    vectors = embeddings.embed_documents(["a cat", "a kitten", "tax law"])
    assert len(vectors) == 3, vectors
    assert all(abs(math.hypot(*vector) - 1) < 1e-3 for vector in vectors), own_tokens
    assert max(abs(a - b) for a, b in zip(embeddings.embed_query("a cat"), vectors[0], strict=True)) < 1e-3
assert (
    len(OpenAIEmbeddings(model=MODEL, check_embedding_ctx_length=False, dimensions=64, **WHERE).embed_query("a")) == 64
)
