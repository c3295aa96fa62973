"""Anthropic's client, unchanged: messages, streams, tools and their results, thinking, forms, counts, errors."""

import sys

import anthropic
from anthropic import types
from pydantic import BaseModel


class City(BaseModel):
    name: str
    capital: bool


URL, MODEL = sys.argv[1].removesuffix("/v1"), sys.argv[2]
TOOL = {
    "name": "weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["unit", "days"],
        "additionalProperties": False,
    },
}
ASK = [{"role": "user", "content": "What is the capital of Japan?"}]
SHORT = {"model": MODEL, "messages": ASK, "max_tokens": 12, "extra_body": {"temperature": 0}}
QUIET = {"thinking": {"type": "disabled"}}  # the template lets models think, and this one would for too long


def strict(kind, value):
    """`value` is what the client's types say, to the letter: the client itself does not check that."""
    kind.model_validate(value.to_dict(), strict=True)
    return value


client = anthropic.Anthropic(base_url=URL, api_key="none", max_retries=0, timeout=120)

whole = strict(types.Message, client.messages.create(**SHORT))
assert "Tokyo" in whole.content[0].text, whole
assert whole.stop_reason in ("end_turn", "max_tokens"), whole
assert whole._request_id == whole.id.removeprefix("msg_"), whole
told = []
with client.messages.stream(**SHORT, metadata={"user_id": "somebody"}) as stream:
    for event in stream:
        if event.type in ("message_start", "message_delta", "content_block_start", "content_block_delta"):
            told.append(event.type)
    final = strict(types.Message, stream.get_final_message())
assert final.content[0].text == whole.content[0].text, final
assert told[0] == "message_start", told
assert told[-1] == "message_delta", told
for usage in (whole.usage, final.usage):
    asked = usage.input_tokens + usage.cache_read_input_tokens
    assert (asked, usage.output_tokens) == (
        whole.usage.input_tokens + whole.usage.cache_read_input_tokens,
        whole.usage.output_tokens,
    ), usage
counted = strict(types.MessageTokensCount, client.messages.count_tokens(model=MODEL, messages=ASK))
assert counted.input_tokens == whole.usage.input_tokens + whole.usage.cache_read_input_tokens, counted
assert client.beta.messages.count_tokens(model=MODEL, messages=ASK).input_tokens == counted.input_tokens

stopped = client.messages.create(**SHORT, stop_sequences=["Tokyo"])
assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Tokyo"), stopped
begun = client.messages.create(**{**SHORT, "messages": [*ASK, {"role": "assistant", "content": "The capital is"}]})
assert begun.content[0].text, begun

for choice in ({"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "weather"}):
    forced = {**SHORT, **QUIET, "max_tokens": 64, "tools": [TOOL], "tool_choice": choice}
    answer = strict(types.Message, client.messages.create(**forced))
    (call,) = answer.content
    assert (answer.stop_reason, call.type, call.name) == ("tool_use", "tool_use", "weather"), answer
    assert call.input["unit"] in ("C", "F"), call
    with client.messages.stream(**forced) as stream:
        assert stream.get_final_message().content[0].input == call.input
    results = [
        {"role": "assistant", "content": answer.content},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": [{"type": "text", "text": "sunny", "cache_control": {"type": "ephemeral"}}],
                }
            ],
        },
    ]
    again = client.messages.create(**{**SHORT, "messages": [*ASK, *results], "tools": [TOOL], "max_tokens": 4})
    assert again.usage.output_tokens <= 4, again

parsed = client.messages.parse(**{**SHORT, **QUIET, "max_tokens": 60}, output_format=City)
assert isinstance(parsed.parsed_output, City), parsed

assert [model.id for model in client.models.list()] == [MODEL]

image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "A" * 4000}}
for wrong, kind, words in (
    ({"model": "other"}, anthropic.NotFoundError, "model: "),
    ({"messages": [{"role": "user", "content": [image]}]}, anthropic.BadRequestError, "messages[0].content[0].type: "),
    ({"max_tokens": 0}, anthropic.BadRequestError, "max_tokens: "),
):
    try:
        client.messages.create(**{**SHORT, **wrong})
    except kind as error:
        types.ErrorResponse.model_validate(error.body, strict=True)
        assert error.body["error"]["message"].startswith(words), error
        assert error.request_id == error.body["request_id"], error
    else:
        raise AssertionError(f"{wrong} was taken")
