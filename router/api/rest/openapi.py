"""What the OpenAPI page says of bodies, parameters and answers.

Answers are plain mappings in the code, so their schemas are written here; tests hold real answers against them. Each
requires what an answer always has, and names what else may be in it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from common.metric_page import OPENMETRICS
from common.sampling import json_schemas, parameters
from router.api.rest.openai.body_types import Body

Json = dict[str, Any]

STRING: Json = {"type": "string"}
INTEGER: Json = {"type": "integer"}
NUMBER: Json = {"type": "number"}
OBJECT: Json = {"type": "object"}
OPTIONAL_TEXT: Json = {"type": ["string", "null"]}
OPTIONAL_OBJECT: Json = {"type": ["object", "null"]}


METRICS: Json = {
    **OPTIONAL_OBJECT,
    "description": "if include_metrics asks for it: times and workers of the one answer (docs/tracing.md)",
}


@functools.cache
def schemas(bodies: tuple[type[Body], ...]) -> tuple[tuple[Json, ...], dict[str, Json]]:
    """(a reference to each body's JSON Schema, all schemas by name), sampling parameters with help and bounds."""
    reference = "#/components/schemas/{name}"
    references, components = msgspec.json.schema_components(bodies, ref_template=reference)
    sampling, inner = json_schemas(reference.format(name="{model}"))
    for body in bodies:
        properties, own = components[body.__name__]["properties"], getattr(body.__base__, "__struct_fields__", ())
        for name, parameter in parameters().items():
            plain = [{"type": "string"}, {"type": "null"}] if parameter.is_texts else [{"type": "null"}]
            for one in (name, *parameter.rest_aliases):
                if one in properties and one not in own:
                    properties[one] = {"anyOf": [sampling[name], *plain]}
                elif one in properties:
                    properties[one].get("anyOf", [properties[one]])[0]["description"] = parameter.help
    return references, {**components, **inner}


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
    return _with_optional(
        head, usage={"anyOf": [ref("Usage"), {"type": "null"}]}, metrics=METRICS, baton=ref("BatonReport")
    )


def _choice(**properties: Json) -> Json:
    head = _object(index=INTEGER, **properties, logprobs=OPTIONAL_OBJECT, finish_reason=OPTIONAL_TEXT)
    stopped_by = "the stop string, or the stop token's id, that ended the answer"
    return _with_optional(head, stop_reason={"type": ["string", "integer", "null"], "description": stopped_by})


_CALL = _with_optional(_object(function=OBJECT), id=STRING, type=STRING, index=INTEGER)
_MESSAGE = _with_optional(
    _object(role=STRING, content=OPTIONAL_TEXT),
    refusal=OPTIONAL_TEXT,
    reasoning_content=STRING,
    reasoning=STRING,
    tool_calls=_list(_CALL),
)
_DELTA = {
    "type": "object",
    "properties": {
        "role": STRING,
        "content": STRING,
        "reasoning_content": STRING,
        "reasoning": STRING,
        "tool_calls": _list(_CALL),
    },
}
_PROMPT_LOGPROBS: Json = {
    **_list(OPTIONAL_OBJECT),
    "description": "for each prompt token, by token id: logprob, rank and decoded_token; null for the first one",
}
_MODEL_LIST = _object(object={"const": "list"}, data=_list(ref("Model")))
_EMBEDDING = _object(object={"const": "embedding"}, index=INTEGER, embedding={"anyOf": [_list(NUMBER), STRING]})

_MESSAGE_USAGE = _with_optional(
    _object(
        input_tokens=INTEGER,
        cache_creation_input_tokens=INTEGER,
        cache_read_input_tokens=INTEGER,
        output_tokens=INTEGER,
    ),
    output_tokens_details=_object(thinking_tokens=INTEGER),
)

COMPONENTS: dict[str, Json] = {
    "AnthropicError": _object(type={"const": "error"}, error=_object(type=STRING, message=STRING), request_id=STRING),
    "Error": _object(error=_object(message=STRING, type=STRING, param=OPTIONAL_TEXT, code=OPTIONAL_TEXT)),
    "Usage": _with_optional(
        _object(prompt_tokens=INTEGER, completion_tokens=INTEGER, total_tokens=INTEGER),
        prompt_tokens_details=_object(cached_tokens=INTEGER),
        completion_tokens_details=_object(reasoning_tokens=INTEGER),
    ),
    "EmbeddingsUsage": _object(
        prompt_tokens=INTEGER, total_tokens=INTEGER, prompt_tokens_details=_object(cached_tokens=INTEGER)
    ),
    "ResponseUsage": _object(
        input_tokens=INTEGER,
        input_tokens_details=_object(cached_tokens=INTEGER, cache_write_tokens=INTEGER),
        output_tokens=INTEGER,
        output_tokens_details=_object(reasoning_tokens=INTEGER),
        total_tokens=INTEGER,
    ),
    "BatonReport": {
        **_object(request_id=STRING, timings=OBJECT),
        "description": "What Baton did for the request: RequestReport of protos/baton/v1/types.proto.",
        "additionalProperties": True,
    },
    "ChatCompletion": _with_optional(
        _generated("chat.completion", _choice(message=_MESSAGE)), prompt_logprobs=_PROMPT_LOGPROBS
    ),
    "ChatCompletionChunk": _generated("chat.completion.chunk", _choice(delta=_DELTA)),
    "Completion": _generated("text_completion", _with_optional(_choice(text=STRING), prompt_logprobs=_PROMPT_LOGPROBS)),
    "Response": {
        **_with_optional(
            _object(
                id=STRING,
                object={"const": "response"},
                created_at=INTEGER,
                status=STRING,
                model=STRING,
                output=_list(OBJECT),
                error=OPTIONAL_OBJECT,
                incomplete_details=OPTIONAL_OBJECT,
                usage={"anyOf": [ref("ResponseUsage"), {"type": "null"}]},
            ),
            metrics=METRICS,
            baton=ref("BatonReport"),
        ),
        "description": "Further fields repeat what the request says.",
        "additionalProperties": True,
    },
    "ResponseEvent": {
        **_object(type=STRING, sequence_number=INTEGER),
        "description": "Further fields depend on the type, as OpenAI has them.",
        "additionalProperties": True,
    },
    "Message": _with_optional(
        _object(
            id=STRING,
            type={"const": "message"},
            role={"const": "assistant"},
            model=STRING,
            content=_list(OBJECT),
            stop_reason=STRING,
            stop_sequence=OPTIONAL_TEXT,
            usage=_MESSAGE_USAGE,
        ),
        metrics=METRICS,
        baton=ref("BatonReport"),
    ),
    "MessageEvent": {
        **_object(type=STRING),
        "description": "Further fields depend on the type, as Anthropic has them.",
        "additionalProperties": True,
    },
    "MessageTokens": _object(input_tokens=INTEGER),
    "Embeddings": _object(object={"const": "list"}, data=_list(_EMBEDDING), model=STRING, usage=ref("EmbeddingsUsage")),
    "Model": _object(id=STRING, object={"const": "model"}, created=INTEGER, owned_by=STRING, max_model_len=INTEGER),
    "ModelList": _MODEL_LIST,
    "PrefixHinted": _object(num_tokens=INTEGER, num_blocks=INTEGER, workers=_list(OBJECT)),
    "Tokens": _with_optional(
        _object(token_ids=_list(INTEGER), count=INTEGER, max_model_len=INTEGER),
        tokens=_list(INTEGER),
        token_strs={"type": ["array", "null"], "items": OPTIONAL_TEXT},
    ),
    "Text": _with_optional(_object(text=STRING), prompt=STRING),
    "TokenizerInfo": {**OBJECT, "additionalProperties": OPTIONAL_TEXT},
    "Version": _object(version=STRING),
    "Health": _with_optional(_object(status=STRING), reason=STRING),
    "Decisions": _object(decisions=_list(OBJECT)),
    "Requests": _object(requests=_list(ref("FinishedRequest"))),
    "FinishedRequest": {
        **_object(request_id=STRING, time=NUMBER, status=STRING, total_ms=NUMBER, stages=_list(OBJECT)),
        "description": "FinishedRequest of protos/baton/v1/router.proto.",
        "additionalProperties": True,
    },
}


KEY, KEY_HEADER = "ApiKey", "ApiKeyHeader"
SECURITY_SCHEMES: dict[str, Json] = {
    KEY: {
        "type": "http",
        "scheme": "bearer",
        "description": "Authorization: Bearer KEY. Only a router with --api-keys-file asks for one.",
    },
    KEY_HEADER: {
        "type": "apiKey",
        "in": "header",
        "name": "X-Api-Key",
        "description": "The same, as Anthropic has it.",
    },
}
SECURITY: list[Json] = [{}, {KEY: []}, {KEY_HEADER: []}]
"""Of all operations but those that never ask for a key. Which routers do is no matter of the API."""


def _answer(description: str, content: dict[str, Json]) -> Json:
    return {"description": description, "content": {kind: {"schema": schema} for kind, schema in content.items()}}


def _error(name: str) -> Json:
    return _answer("What went wrong. 429 and 503 come with Retry-After.", {"application/json": ref(name)})


ERROR, ANTHROPIC_ERROR = _error("Error"), _error("AnthropicError")


def json_answer(name: str, description: str = "Done") -> Json:
    """`name`: of one of `COMPONENTS`."""
    return _answer(description, {"application/json": ref(name)})


def streamed_answer(name: str, event: str, end: str, error: str = "an Error") -> Json:
    """Whole, or with `stream` as server-sent events, whose data are JSON of `event`."""
    said = f"Server-sent events. The data of each is JSON: a {event}, or {error} if the answer fails midway. {end}"
    events = {**STRING, "description": said, "contentMediaType": "text/event-stream"}
    return _answer(
        "The whole answer, or its events if `stream` is true",
        {"application/json": ref(name), "text/event-stream": events},
    )


CHAT_ANSWER = streamed_answer("ChatCompletion", "ChatCompletionChunk", "At the end comes `data: [DONE]`.")
COMPLETION_ANSWER = streamed_answer("Completion", "Completion", "At the end comes `data: [DONE]`.")
RESPONSE_ANSWER = streamed_answer("Response", "ResponseEvent", "Each is named by its type.")
MESSAGE_ANSWER = streamed_answer("Message", "MessageEvent", "Each is named by its type.", "an AnthropicError")
METRICS_ANSWER = _answer(
    "Prometheus' text format, or OpenMetrics for those who accept it", {"text/plain": STRING, OPENMETRICS: STRING}
)
PAGE_ANSWER = _answer("A page", {"text/html": STRING})

MODEL_PARAMETER: Json = {
    "name": "model",
    "in": "path",
    "required": True,
    "schema": STRING,
    "description": "the name that /v1/models gives; it may have slashes",
}

REQUEST_ID_PARAMETER: Json = {
    "name": "request_id",
    "in": "path",
    "required": True,
    "schema": STRING,
    "description": "as the answer's header X-Request-Id has it; of further answers to one body with -1, -2, ... behind",
}


def query_number(name: str, default: int, most: int, description: str) -> Json:
    schema = {**INTEGER, "minimum": 1, "maximum": most, "default": default}
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": description}


def operation(
    answer: Json,
    *,
    body: Json | None = None,
    parameters: Sequence[Json] = (),
    unavailable: Json | None = None,
    error: Json = ERROR,
) -> Json:
    """`body`: a reference to its schema. `unavailable`: the answer of status 503, if that is not an error's."""
    responses = {"200": answer, **({} if unavailable is None else {"503": unavailable}), "default": error}
    made: Json = {"responses": responses}
    if body is not None:
        made["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if parameters:
        made["parameters"] = list(parameters)
    return made
