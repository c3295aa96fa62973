"""`/v1/chat/completions`, `/v1/completions`, `/v1/responses` and `/v1/messages`: from a body to the answer that is made
of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial

from fastapi import Request
from fastapi.responses import Response

from router.api.api_keys import current_client
from router.api.asking import Call, Prompts, TextBody, requests_of
from router.api.rest.anthropic.count_tokens import begin
from router.api.rest.anthropic.messages import MessageAnswer
from router.api.rest.anthropic.messages_body import MessagesBody
from router.api.rest.in_process import ROOM
from router.api.rest.openai.answer import CompletionAnswer
from router.api.rest.openai.body_types import refuse_if_asked
from router.api.rest.openai.disconnect import EventStream, json_answer, unless_gone
from router.api.rest.openai.echo import Echo
from router.api.rest.openai.formats import AnswerFormat, ChatFormat, CompletionFormat
from router.api.rest.openai.generation_bodies import ChatBody, CompletionBody
from router.api.rest.openai.large_json import json_parts
from router.api.rest.openai.parsing import read, request_id_of
from router.api.rest.openai.responses import ResponseAnswer
from router.api.rest.openai.responses_body import ResponsesBody
from router.api.rest.openai.responses_input import InputItem
from router.api.rest.openai.stored_responses import StoredResponses
from router.api.rest.openai.tools import NamedTool
from router.fleet.served_model import ServedModel
from router.limits.admission import Ending
from router.limits.clients import call_hints
from router.limits.gate import HeldBytes
from router.running.request import GenerationRequest, Prompt
from router.running.room import Room
from router.serving.choices import Hold
from router.serving.gateway import Gateway

Answer = CompletionAnswer | ResponseAnswer | MessageAnswer

AnswerMaker = Callable[[Sequence[GenerationRequest], str, Hold], Answer]
Ask = Callable[[contextlib.ExitStack], Awaitable[Answer]]

NOTHING_STORED = "is not supported: this router stores no responses; send the whole conversation"


class GenerationHandlers:
    def __init__(self, gateway: Gateway, stored: StoredResponses | None = None) -> None:
        self._gateway = gateway
        self._stored = stored

    async def chat(self, request: Request) -> Response:
        arrived_at = time.monotonic()
        body = await read(ChatBody, request, self._gateway.admission)
        chat_format = ChatFormat(
            is_named_call=isinstance(body.tool_choice, NamedTool) and body.tool_choice.is_named,
            also_reasoning=self._gateway.also_reasoning,
            tokens_as_ids=bool(body.return_tokens_as_token_ids),
        )

        async def prompts(model: ServedModel, keep: int | None) -> list[Prompt]:
            conversation = body.conversation(model.limits)
            echoed.append(body.echoed(conversation))
            chat_prompt, client = self._gateway.preparation.chat_prompt, current_client.get()
            return [await chat_prompt(model, conversation, keep=keep, client=client)]

        echoed: list[str] = []
        echo = Echo(echoed, is_prompt=False) if body.echo else None
        make_answer = self._answer_maker(body, chat_format, echo)
        return await self._generate(request, body, prompts, make_answer, arrived_at)

    async def responses(self, request: Request) -> Response:
        arrived_at = time.monotonic()
        body = await read(ResponsesBody, request, self._gateway.admission)
        request_id = request_id_of(request, body.request_id)
        response_id, keep, session = f"resp_{request_id}", None, ""
        earlier: list[InputItem] = []
        if self._stored is None:
            refuse_if_asked(body, body.stored, NOTHING_STORED)
        else:
            if body.previous_response_id:
                continuing = self._stored.continued(body.previous_response_id, request.state.held_bytes)
                continued = await unless_gone(request, continuing)
                session, earlier = continued.session, continued.items
            if body.store is not False:
                response_id = self._stored.new_id()
                session = session or response_id
                own = call_hints(request.headers, body.session() or session).session
                keep = self._stored.keeper(body, response_id, own)

        async def prompts(model: ServedModel, keep: int | None) -> list[Prompt]:
            conversation = body.response_conversation(model.limits, earlier)
            chat_prompt, client = self._gateway.preparation.chat_prompt, current_client.get()
            return [await chat_prompt(model, conversation, "input", keep=keep, client=client)]

        def answer(requests: Sequence[GenerationRequest], request_id: str, hold: Hold) -> ResponseAnswer:
            return ResponseAnswer(
                self._gateway.generation,
                requests[0],
                request_id,
                body.echoed(is_stored=keep is not None),
                wants_logprobs=body.wants_logprobs,
                wants_kept_reasoning=body.wants_kept_reasoning,
                wants_metrics=self._wants_metrics(body),
                response_id=response_id,
                keep=keep,
                hold=hold,
            )

        return await self._generate(request, body, prompts, answer, arrived_at, session)

    async def messages(self, request: Request) -> Response:
        arrived_at = time.monotonic()
        begin(request)
        body = await read(MessagesBody, request, self._gateway.admission)

        async def prompts(model: ServedModel, keep: int | None) -> list[Prompt]:
            chat_prompt, client = self._gateway.preparation.chat_prompt, current_client.get()
            return [await chat_prompt(model, body.conversation(model.limits), keep=keep, client=client)]

        def answer(requests: Sequence[GenerationRequest], request_id: str, hold: Hold) -> MessageAnswer:
            return MessageAnswer(
                self._gateway.generation,
                requests[0],
                request_id,
                shows_thinking=body.shows_thinking,
                wants_metrics=self._wants_metrics(body),
                hold=hold,
            )

        return await self._generate(request, body, prompts, answer, arrived_at)

    async def completions(self, request: Request) -> Response:
        arrived_at = time.monotonic()
        body = await read(CompletionBody, request, self._gateway.admission)

        async def prompts(model: ServedModel, keep: int | None) -> list[Prompt]:
            special = body.add_special_tokens is not False
            given = body.prompts()
            prepare, client = self._gateway.preparation.prompts, current_client.get()
            made = await prepare(model, given, "prompt", add_special_tokens=special, keep=keep, client=client)
            for prompt, one in zip(given, made, strict=True) if body.echo else ():
                is_known = isinstance(prompt, str) and not one.is_cut
                echoed.append(str(prompt) if is_known else await self._text(model, one.token_ids))
            return made

        echoed: list[str] = []
        echo = Echo(echoed, generates=not body.is_only_echo) if body.echo else None
        completion_format = CompletionFormat(tokens_as_ids=bool(body.return_tokens_as_token_ids))
        make_answer = self._answer_maker(body, completion_format, echo)
        return await self._generate(request, body, prompts, make_answer, arrived_at)

    async def _text(self, model: ServedModel, token_ids: list[int]) -> str:
        """A prompt's text, with its control tokens."""
        detokenize, client = self._gateway.preparation.detokenize, current_client.get()
        return await detokenize(model, token_ids, "prompt", skip_special_tokens=False, client=client)

    def _wants_metrics(self, body: TextBody) -> bool:
        return self._gateway.per_request_metrics if body.include_metrics is None else body.include_metrics

    def _answer_maker(
        self, body: ChatBody | CompletionBody, answer_format: AnswerFormat, echo: Echo | None = None
    ) -> AnswerMaker:
        return lambda requests, request_id, hold: CompletionAnswer(
            self._gateway.generation,
            requests,
            answer_format,
            request_id=request_id,
            choices=body.choices,
            echo=echo,
            wants_logprobs=body.wants_logprobs,
            wants_prompt_logprobs=body.prompt_logprobs is not None,
            wants_token_ids=bool(body.return_token_ids),
            wants_metrics=self._wants_metrics(body),
            wants_usage_chunk=body.wants_usage_chunk,
            wants_usage_so_far=body.wants_usage_so_far,
            hold=hold,
        )

    async def _generate(
        self,
        request: Request,
        body: TextBody,
        prompts: Prompts,
        make_answer: AnswerMaker,
        arrived_at: float,
        session: str = "",
    ) -> Response:
        """`session`: of a request that names none."""
        request_id = request_id_of(request, body.request_id)
        hints = call_hints(request.headers, body.session() or session)
        held: HeldBytes = request.state.held_bytes  # what comes of the body counts like the body
        room: Room | None = getattr(request.state, ROOM, None)
        call = Call(interface="rest", request_id=request_id, arrived_at=arrived_at, hints=hints, room=room)
        ask = partial(self._answer, body, prompts, make_answer, call, held.grow)
        headers = dict.fromkeys(body.id_headers, request_id)
        if not body.stream:
            return await json_answer(request, _whole(ask), headers)
        first, events = await unless_gone(request, _streamed(ask))
        return EventStream(first, events, headers)

    async def _answer(
        self,
        body: TextBody,
        prompts: Prompts,
        make_answer: AnswerMaker,
        call: Call,
        hold: Hold,
        within: contextlib.ExitStack,
    ) -> Answer:
        """`within` has to stay open until the answer's end."""
        requests, ending = await requests_of(self._gateway, body, prompts, call, within)
        answer = make_answer(requests, call.request_id, hold)
        if body.stream:
            within.callback(_count_failure, answer, ending)
        return answer


def _count_failure(answer: Answer, ending: Ending) -> None:
    """A stream tells a failure as an event, and raises nothing."""
    if answer.failure is not None:
        ending.failed(answer.failure)


async def _whole(ask: Ask) -> AsyncGenerator[bytes, None]:
    """Parts of one JSON object."""
    with contextlib.ExitStack() as within:
        answer = await ask(within)
        for part in json_parts(await answer.whole()):
            yield part


async def _streamed(ask: Ask) -> tuple[bytes, AsyncGenerator[bytes, None]]:
    """The first of the server-sent events, and the others."""
    with contextlib.ExitStack() as within:
        answer = await ask(within)
        events = answer.events(within.pop_all())
    return await anext(events), events  # it has begun: from here on it closes `within` itself
