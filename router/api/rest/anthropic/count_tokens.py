"""`/v1/messages/count_tokens`, and what holds for each of Anthropic's paths."""

from __future__ import annotations

from fastapi import Request
from fastapi.responses import Response

from common.errors import InvalidArgumentError
from router.api.api_keys import current_client
from router.api.rest.anthropic.messages_body import CountTokensBody
from router.api.rest.http.error_body import ANTHROPIC_PATH
from router.api.rest.http.errors import json_response, request_id_headers
from router.api.rest.openai.parsing import read, request_id_of
from router.serving.gateway import Gateway

VERSION_HEADER = "anthropic-version"
VERSIONS = ("2023-06-01", "2026-10-21")
"""The later one takes less: no documents and no citations where nothing could come of them, which are refused here in
either, and no sampling parameters, which are of use here in either."""


def begin(request: Request) -> str:
    """The request's id, which its errors have from here on. Raises `InvalidArgumentError` if the client asks for a
    version of the interface that is not known here."""
    request_id = request_id_of(request, None)
    version = request.headers.get(VERSION_HEADER)
    if version not in (None, *VERSIONS):
        raise InvalidArgumentError(VERSION_HEADER, f"must be {' or '.join(VERSIONS)}, not {version[:100]!r}")
    return request_id


class CountTokensHandler:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def count_tokens(self, request: Request) -> Response:
        request_id, admission = begin(request), self._gateway.admission
        body = await read(CountTokensBody, request, admission)
        client = current_client.get()
        admission.charge(client)
        model = admission.served(body.model or "")
        body.check()
        chat_prompt, conversation = self._gateway.preparation.chat_prompt, body.conversation(model.limits)
        prompt = await chat_prompt(model, conversation, has_answer=False, client=client)
        return json_response(
            {"input_tokens": len(prompt.token_ids)}, headers=request_id_headers(request_id, ANTHROPIC_PATH)
        )
