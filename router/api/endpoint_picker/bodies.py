"""From an HTTP request that a proxy tells of to the request that a router would make of it, by the same steps as its
REST interface: what routing depends on is the same in both.
"""

from __future__ import annotations

from collections.abc import Mapping

from common.errors import InvalidArgumentError
from common.validation import check_request_id
from router.api.asking import Call, TextBody, prepared
from router.api.rest.anthropic.messages_body import MessagesBody
from router.api.rest.openai.generation_bodies import ChatBody, CompletionBody
from router.api.rest.openai.parsing import parse
from router.api.rest.openai.responses_body import ResponsesBody
from router.fleet.served_model import ServedModel
from router.limits.clients import REQUEST_ID_HEADER, ApiClient, call_hints
from router.preparing.preparation import Preparation
from router.running.request import GenerationRequest, Prompt, new_request_id
from router.serving.gateway import Gateway

BODIES: Mapping[str, type[TextBody]] = {
    "/v1/chat/completions": ChatBody,
    "/v1/completions": CompletionBody,
    "/v1/responses": ResponsesBody,
    "/v1/messages": MessagesBody,
}
"""By path: the requests that models answer."""


async def request_of(
    gateway: Gateway,
    body_class: type[TextBody],
    data: bytes,
    headers: Mapping[str, str],
    client: ApiClient | None,
    arrived_at: float,
) -> GenerationRequest:
    """The first answer that the body asks for. `headers` by their names in lower case.

    Raises what the REST interface would answer with, and `InvalidArgumentError` for what continues a stored response.
    """
    body = parse(body_class, data)
    request_id = body.request_id or headers.get(REQUEST_ID_HEADER) or new_request_id()
    check_request_id(request_id, REQUEST_ID_HEADER)
    hints = call_hints(headers, body.session())
    if isinstance(body, ResponsesBody) and body.previous_response_id:
        raise InvalidArgumentError("previous_response_id", "only the router that gets the request knows what it has")

    async def prompts(model: ServedModel, keep: int | None) -> list[Prompt]:
        return await _prompts(gateway.preparation, body, model, keep, client)

    call = Call(interface="rest", request_id=request_id, arrived_at=arrived_at, hints=hints)
    return (await prepared(gateway, body, prompts, call, client))[0]


async def _prompts(
    preparation: Preparation, body: TextBody, model: ServedModel, keep: int | None, client: ApiClient | None
) -> list[Prompt]:
    if isinstance(body, CompletionBody):
        special = body.add_special_tokens is not False
        given = body.prompts()
        return await preparation.prompts(model, given, "prompt", add_special_tokens=special, keep=keep, client=client)
    if isinstance(body, ResponsesBody):
        conversation = body.response_conversation(model.limits)
        return [await preparation.chat_prompt(model, conversation, "input", keep=keep, client=client)]
    return [await preparation.chat_prompt(model, body.conversation(model.limits), keep=keep, client=client)]


def path_of(given: str, root_path: str) -> str:
    """Of a request's `:path`, what the router's REST interface goes by."""
    path = given.partition("?")[0]
    return (path[len(root_path) :] or "/") if f"{path}/".startswith(f"{root_path}/") else path
