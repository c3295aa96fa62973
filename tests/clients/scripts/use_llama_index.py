"""LlamaIndex's classes for servers like OpenAI's, unchanged: chat, completion, streams, tools, parsed answers, embeddings."""

import asyncio
import math
import sys

from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel


class City(BaseModel):
    """A city."""

    name: str
    capital: bool


def weather(unit: str, days: int) -> str:
    """The weather in a city."""
    return f"sunny for {days} days, 20 {unit}"


URL, MODEL = sys.argv[1:3]
WHERE = {"api_base": URL, "api_key": "none", "max_retries": 0, "timeout": 120}
ASK = "What is the capital of Japan?"
MESSAGES = [ChatMessage(role=MessageRole.SYSTEM, content="Be brief."), ChatMessage(role=MessageRole.USER, content=ASK)]


def llm(max_tokens: int = 12, *, is_chat_model: bool = True) -> OpenAILike:
    return OpenAILike(
        model=MODEL,
        temperature=0,
        max_tokens=max_tokens,
        context_window=2048,
        is_chat_model=is_chat_model,
        is_function_calling_model=is_chat_model,
        **WHERE,
    )


whole = llm().chat(MESSAGES)
assert "Tokyo" in whole.message.content, whole
assert [piece.message.content for piece in llm().stream_chat(MESSAGES)][-1] == whole.message.content
assert asyncio.run(llm().achat(MESSAGES)).message.content == whole.message.content
assert "Tokyo" in llm().complete(ASK).text

plain = llm(6, is_chat_model=False)
completed = plain.complete("The capital of Japan is")
assert "Tokyo" in completed.text, completed
assert [piece.text for piece in plain.stream_complete("The capital of Japan is")][-1] == completed.text

tool = FunctionTool.from_defaults(weather)
called = llm(64).chat_with_tools([tool], ASK, tool_required=True)
(call,) = llm().get_tool_calls_from_response(called)
assert call.tool_name == "weather", called
assert isinstance(call.tool_kwargs["days"], int), called
*_, streamed = llm(64).stream_chat_with_tools([tool], ASK, tool_required=True)
assert llm().get_tool_calls_from_response(streamed)[0].tool_kwargs == call.tool_kwargs, streamed
result = ChatMessage(role=MessageRole.TOOL, content="sunny", additional_kwargs={"tool_call_id": call.tool_id})
again = llm(4).chat_with_tools([tool], chat_history=[ChatMessage(role="user", content=ASK), called.message, result])
assert again.raw.usage.completion_tokens <= 4, again

structured = llm(60).as_structured_llm(City)
assert isinstance(structured.chat(MESSAGES).raw, City)

embedding = OpenAILikeEmbedding(model_name=MODEL, embed_batch_size=2, **WHERE)
vectors = embedding.get_text_embedding_batch(["a cat", "a kitten", "tax law"])
assert len(vectors) == 3, vectors
assert all(abs(math.hypot(*vector) - 1) < 1e-3 for vector in vectors)
assert max(abs(a - b) for a, b in zip(embedding.get_query_embedding("a cat"), vectors[0], strict=True)) < 1e-3
