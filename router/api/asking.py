"""From a body that asks for text to the requests that answer it, whichever door it came by: REST's paths and both forms
of the Open Inference Protocol."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from common.sampling import FieldName, kept_tokens
from router.api.api_keys import current_client
from router.api.rest.anthropic.messages_body import MessagesBody
from router.api.rest.openai.generation_bodies import ChatBody, CompletionBody
from router.api.rest.openai.responses_body import ResponsesBody
from router.fleet.served_model import ServedModel
from router.limits.admission import Ending
from router.limits.clients import ApiClient, CallHints
from router.running.request import GenerationRequest, Prompt
from router.running.room import Room
from router.serving.gateway import Gateway

DEFAULT_COMPLETION_TOKENS = 16  # what OpenAI's text completion gives if max_tokens is not set

TextBody = ChatBody | CompletionBody | ResponsesBody | MessagesBody

Prompts = Callable[[ServedModel, int | None], Awaitable[list[Prompt]]]
"""Makes a body's prompts; of each so many tokens at most, the last ones."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Call:
    """What is known of a call beside its body."""

    interface: str  # "grpc" or "rest"
    request_id: str
    arrived_at: float  # time.monotonic()
    hints: CallHints
    room: Room | None = None  # of batches, if it is a request of one
    timeout_s: float | None = None  # that the client has left; None if it set no deadline


async def requests_of(
    gateway: Gateway,
    body: TextBody,
    prompts: Prompts,
    call: Call,
    within: contextlib.ExitStack,
    field_name: FieldName = str,
) -> tuple[list[GenerationRequest], Ending]:
    """The requests for all answers that `body` asks for, charged to the client, and how they end. `within` has to stay
    open until the last answer's end. Otherwise as `prepared`."""
    client = current_client.get()
    of_batch = call.room is not None
    ending = within.enter_context(gateway.admission.running(call.interface, call.timeout_s, client, of_batch=of_batch))
    requests = await prepared(gateway, body, prompts, call, client, field_name)
    first, check = requests[0], gateway.preparation.check_guided
    await check(first.sampling_params, first.sampling_field, first.tools, first.form, client)
    field = "prompt" if len(requests) > body.choices.num_candidates else body.choices.field()
    within.enter_context(gateway.generation.charged(requests, field_name(field)))
    return requests, ending


async def prepared(
    gateway: Gateway,
    body: TextBody,
    prompts: Prompts,
    call: Call,
    client: ApiClient | None,
    field_name: FieldName = str,
) -> list[GenerationRequest]:
    """The requests for all answers that `body` asks for. `field_name`: from a field of `body` to the client's name for
    it. Raises `BatonError`: what is wrong with the body, or that no request is taken now."""
    admission, preparation = gateway.admission, gateway.preparation
    model = await admission.serving(body.model or "")
    body.check()
    sampling = body.sampling()

    def name(parameter: str) -> str:
        return field_name(body.field_name(parameter))

    return preparation.requests(
        model,
        await prompts(model, kept_tokens(sampling, model.limits, name=name)),
        sampling,
        request_id=call.request_id,
        cache_salt=body.cache_salt or "",
        retain=body.retained(preparation.max_retain_s),
        priority=body.priority or 0,
        slo=admission.slo(client, body.targets(), call.hints.targets),
        arrived_at=call.arrived_at,
        timeout_s=call.timeout_s,
        default_max_tokens=DEFAULT_COMPLETION_TOKENS if isinstance(body, CompletionBody) else None,
        name=name,
        client=client,
        hints=call.hints,
        room=call.room,
        choices=body.choices,
        choices_name=field_name,
        # The last events of a stream of responses repeat all that was said.
        is_whole=not body.stream or isinstance(body, ResponsesBody),
    )
