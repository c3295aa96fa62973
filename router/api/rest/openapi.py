"""What the OpenAPI page says of parameters and answers. Bodies of requests are described by `sampling_fields.schemas`.

Answers are plain mappings in the code, so their schemas are written here; tests hold real answers against them. Each
names what an answer always has: more may be in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

Json = dict[str, Any]

STRING: Json = {"type": "string"}
INTEGER: Json = {"type": "integer"}
NUMBER: Json = {"type": "number"}
OBJECT: Json = {"type": "object"}
OPTIONAL_TEXT: Json = {"type": ["string", "null"]}


def ref(name: str) -> Json:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(**properties: Json) -> Json:
    """All of them are always there."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _with_optional(schema: Json, **properties: Json) -> Json:
    return {**schema, "properties": {**schema["properties"], **properties}}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _generated(kind: str, choice: Json) -> Json:
    head = _object(id=STRING, object={"const": kind}, created=INTEGER, model=STRING, choices=_list(choice))
    return _with_optional(head, usage={"anyOf": [ref("Usage"), {"type": "null"}]}, baton=ref("BatonReport"))


_ENDED = {"finish_reason": OPTIONAL_TEXT}
_LOGPROBS = {"logprobs": {"type": ["object", "null"]}}
_CALL = _with_optional(_object(function=OBJECT), id=STRING, type=STRING, index=INTEGER)
_MESSAGE = _with_optional(
    _object(role=STRING, content=OPTIONAL_TEXT), reasoning_content=STRING, tool_calls=_list(_CALL)
)
_DELTA = {
    "type": "object",
    "properties": {"role": STRING, "content": STRING, "reasoning_content": STRING, "tool_calls": _list(_CALL)},
}
_MODEL_LIST = _object(object={"const": "list"}, data=_list(ref("Model")))
_EMBEDDING = _object(object={"const": "embedding"}, index=INTEGER, embedding={"anyOf": [_list(NUMBER), STRING]})

COMPONENTS: dict[str, Json] = {
    "Error": _object(error=_object(message=STRING, type=STRING, param=OPTIONAL_TEXT, code=OPTIONAL_TEXT)),
    "Usage": _object(prompt_tokens=INTEGER, total_tokens=INTEGER),
    "BatonReport": {
        **_object(request_id=STRING, timings=OBJECT),
        "description": "What Baton did for the request: RequestReport of protos/baton/v1/types.proto.",
    },
    "ChatCompletion": _generated("chat.completion", _object(index=INTEGER, message=_MESSAGE, **_LOGPROBS, **_ENDED)),
    "ChatCompletionChunk": _generated(
        "chat.completion.chunk", _object(index=INTEGER, delta=_DELTA, **_LOGPROBS, **_ENDED)
    ),
    "Completion": _generated("text_completion", _object(index=INTEGER, text=STRING, **_LOGPROBS, **_ENDED)),
    "Response": _with_optional(
        _object(id=STRING, object={"const": "response"}, created_at=INTEGER, status=STRING, output=_list(OBJECT)),
        error={"type": ["object", "null"]},
        usage={"type": ["object", "null"]},
    ),
    "ResponseEvent": _object(type=STRING, sequence_number=INTEGER),
    "Embeddings": _object(object={"const": "list"}, data=_list(_EMBEDDING), model=STRING, usage=ref("Usage")),
    "Model": _object(id=STRING, object={"const": "model"}, created=INTEGER, owned_by=STRING, max_model_len=INTEGER),
    "ModelList": _MODEL_LIST,
    "PrefixHinted": _object(num_tokens=INTEGER, num_blocks=INTEGER, workers=_list(OBJECT)),
    "Tokens": _with_optional(
        _object(token_ids=_list(INTEGER), count=INTEGER, max_model_len=INTEGER), tokens=_list(INTEGER)
    ),
    "Text": _with_optional(_object(text=STRING), prompt=STRING),
    "TokenizerInfo": {**OBJECT, "additionalProperties": OPTIONAL_TEXT},
    "Version": _object(version=STRING),
    "Health": _with_optional(_object(status=STRING), reason=STRING),
    "Decisions": _object(decisions=_list(OBJECT)),
}


def _answer(description: str, content: dict[str, Json]) -> Json:
    return {"description": description, "content": {kind: {"schema": schema} for kind, schema in content.items()}}


ERROR = _answer("What went wrong. 429 and 503 come with Retry-After.", {"application/json": ref("Error")})


def json_answer(name: str, description: str = "Done") -> Json:
    """`name`: of one of `COMPONENTS`."""
    return _answer(description, {"application/json": ref(name)})


def streamed_answer(name: str, event: str, end: str) -> Json:
    """Whole, or with `stream` as server-sent events, whose data are JSON of `event`."""
    said = f"Server-sent events. The data of each is JSON: a {event}, or an Error if the answer fails midway. {end}"
    events = {**STRING, "description": said, "contentMediaType": "text/event-stream"}
    return _answer(
        "The whole answer, or its events if `stream` is true",
        {"application/json": ref(name), "text/event-stream": events},
    )


CHAT_ANSWER = streamed_answer("ChatCompletion", "ChatCompletionChunk", "At the end comes `data: [DONE]`.")
COMPLETION_ANSWER = streamed_answer("Completion", "Completion", "At the end comes `data: [DONE]`.")
RESPONSE_ANSWER = streamed_answer("Response", "ResponseEvent", "Each is named by its type.")
METRICS_ANSWER = _answer("Prometheus' text format", {CONTENT_TYPE_LATEST.partition(";")[0]: STRING})
PAGE_ANSWER = _answer("A page", {"text/html": STRING})

MODEL_PARAMETER: Json = {
    "name": "model",
    "in": "path",
    "required": True,
    "schema": STRING,
    "description": "the name that /v1/models gives; it may have slashes",
}


def query_number(name: str, default: int, most: int, description: str) -> Json:
    schema = {**INTEGER, "minimum": 1, "maximum": most, "default": default}
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": description}


def operation(
    answer: Json, *, body: Json | None = None, parameters: Sequence[Json] = (), unavailable: Json | None = None
) -> Json:
    """`body`: a reference to its schema. `unavailable`: the answer of status 503, if that is not an error's."""
    responses = {"200": answer, **({} if unavailable is None else {"503": unavailable}), "default": ERROR}
    made: Json = {"responses": responses}
    if body is not None:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if parameters:
        made["parameters"] = list(parameters)
    return made
