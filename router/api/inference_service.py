"""`baton.v1.InferenceService`: what application teams call over gRPC."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

import grpc

from common.cache_hints import Retain
from common.choices import Choices
from common.errors import InvalidArgumentError
from common.sampling import kept_tokens
from common.targets import LatencyTargets, check_targets
from common.validation import check_messages, check_request_id
from protos.baton.v1 import embed_pb2, inference_pb2, worker_pb2
from protos.convert import finish_reason_to_proto, token_to_proto
from protos.messages import given_fields, message_of, value_of
from router.api.api_keys import current_client
from router.api.grpc_chat import conversation
from router.fleet.served_model import ServedModel
from router.limits.clients import REQUEST_ID_HEADER, call_hints
from router.limits.targets import GivenTargets, given_in_body
from router.running.embedding import check_num_inputs
from router.running.request import GenerationRequest, Output, Prompt
from router.serving.choices import likeliest
from router.serving.gateway import Gateway

Context = grpc.aio.ServicerContext[object, object]


def _field_name(name: str) -> str:
    return f"sampling_params.{name}"


def _choices_field(name: str) -> str:
    return f"choices.{name}"


class InferenceService:
    """Handlers raise `BatonError`; `grpc_handlers` makes a status of it."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def Generate(  # noqa: N802
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        return self._answer(request, lambda model, keep: self._prompt(model, request, keep), context)

    def Chat(  # noqa: N802
        self, request: inference_pb2.ChatRequest, context: Context
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        return self._answer(request, lambda model, keep: self._chat_prompt(model, request, keep), context)

    async def Embed(  # noqa: N802
        self, request: inference_pb2.EmbedRequest, context: Context
    ) -> inference_pb2.EmbedResponse:
        arrived_at, gateway, client = time.monotonic(), self._gateway, current_client.get()
        metadata = _metadata(context)
        with gateway.admission.running("grpc", context.time_remaining(), current_client.get()):
            model = await gateway.admission.serving(request.model)
            check_num_inputs(len(request.inputs), "inputs")
            prompts = await self._embed_prompts(model, request)
            if request.pooling not in embed_pb2.Pooling.values():
                raise InvalidArgumentError("pooling", f"{request.pooling} is not known")
            wanted = gateway.preparation.embed_request(
                model,
                prompts,
                request_id=_request_id(request.request_id, metadata),
                pooling=request.pooling,
                dimensions=request.dimensions,
                normalize=request.normalize if request.HasField("normalize") else True,
                cache_salt=request.cache_salt,
                arrived_at=arrived_at,
                timeout_s=context.time_remaining(),
                client=client,
                hints=call_hints(metadata),
            )
            with gateway.admission.gate.bytes_held() as held:
                embedded = await gateway.embeddings.embed(wanted, held.grow)
                response = inference_pb2.EmbedResponse(request_id=wanted.request_id, model=model.limits.model)
                for one in embedded:
                    response.embeddings.add(values=one.values)
                    await asyncio.sleep(0)  # others' turn: the vectors may be long
        response.usage.prompt_tokens = sum(len(prompt.token_ids) for prompt in prompts)
        response.usage.cached_tokens = sum(one.num_cached_tokens for one in embedded)
        return response

    async def _embed_prompts(self, model: ServedModel, request: inference_pb2.EmbedRequest) -> list[Prompt]:
        given: list[str | list[int]] = []
        for index, one in enumerate(request.inputs):
            if bool(one.text) is bool(one.token_ids):
                raise InvalidArgumentError(f"inputs[{index}]", "set one of text and token_ids")
            given.append(list(one.token_ids) or one.text)
        special = _adds_special_tokens(request)
        return await self._gateway.preparation.prompts(
            model, given, "inputs", add_special_tokens=special, has_answer=False, client=current_client.get()
        )

    async def RetainPrefix(  # noqa: N802
        self, request: inference_pb2.RetainPrefixRequest, context: Context
    ) -> inference_pb2.PrefixResponse:
        action = worker_pb2.CACHE_ACTION_RETAIN
        return await self._hint(request.prefix, context, action, seconds=request.seconds)

    async def EvictPrefix(  # noqa: N802
        self, request: inference_pb2.EvictPrefixRequest, context: Context
    ) -> inference_pb2.PrefixResponse:
        return await self._hint(request.prefix, context, worker_pb2.CACHE_ACTION_EVICT)

    async def PrefetchPrefix(  # noqa: N802
        self, request: inference_pb2.PrefetchPrefixRequest, context: Context
    ) -> inference_pb2.PrefixResponse:
        return await self._hint(request.prefix, context, worker_pb2.CACHE_ACTION_PREFETCH)

    async def _hint(
        self,
        prefix: inference_pb2.Prefix,
        context: Context,
        action: worker_pb2.CacheAction.ValueType,
        seconds: float | None = None,
    ) -> inference_pb2.PrefixResponse:
        gateway, client = self._gateway, current_client.get()
        with gateway.admission.running("grpc", context.time_remaining(), client):
            model = await gateway.admission.serving(prefix.model)
            try:
                hint = gateway.preparation.prefix_hint(
                    model,
                    await self._prefix_prompt(model, prefix),
                    num_tokens=prefix.num_tokens,
                    cache_salt=prefix.cache_salt,
                    seconds=seconds,
                    client=client,
                    hints=call_hints(_metadata(context)),
                )
            except InvalidArgumentError as error:
                field = error.field if error.field == "seconds" else f"prefix.{error.field}"
                raise InvalidArgumentError(field, error.reason) from error
            hinted = await gateway.prefix_hints.give(hint, action)
        workers = [message_of(one, inference_pb2.PrefixOnWorker) for one in hinted.workers]
        return inference_pb2.PrefixResponse(num_tokens=hinted.num_tokens, num_blocks=hinted.num_blocks, workers=workers)

    async def _prefix_prompt(self, model: ServedModel, prefix: inference_pb2.Prefix) -> Prompt:
        if not prefix.messages:
            for field in ("tools", "chat_template_kwargs", "chat_template"):
                if getattr(prefix, field):
                    raise InvalidArgumentError(field, "is for messages")
            generate = inference_pb2.GenerateRequest(
                prompt=prefix.prompt,
                prompt_token_ids=prefix.prompt_token_ids,
                add_special_tokens=_adds_special_tokens(prefix),
            )
            return await self._prompt(model, generate)
        if prefix.prompt or prefix.prompt_token_ids:
            raise InvalidArgumentError("messages", "set one of prompt, prompt_token_ids and messages")
        if prefix.HasField("add_special_tokens"):
            raise InvalidArgumentError("add_special_tokens", "is for prompt: the chat template writes these tokens")
        check_messages(len(prefix.messages), model.limits, "messages")
        chat = inference_pb2.ChatRequest(
            messages=prefix.messages,
            tools=prefix.tools,
            chat_template_kwargs=prefix.chat_template_kwargs,
            chat_template=prefix.chat_template,
        )
        return await self._gateway.preparation.chat_prompt(model, conversation(chat), client=current_client.get())

    async def Tokenize(  # noqa: N802
        self, request: inference_pb2.TokenizeRequest, _context: Context
    ) -> inference_pb2.TokenizeResponse:
        self._gateway.admission.charge(current_client.get())
        model = self._gateway.admission.served(request.model)
        if request.messages:
            return inference_pb2.TokenizeResponse(token_ids=await self._chat_token_ids(model, request))
        of_chat = ("tools", "chat_template_kwargs", "chat_template", "add_generation_prompt", "continue_final_message")
        for field in of_chat:
            if any(one.name == field for one, _ in request.ListFields()):
                raise InvalidArgumentError(field, "is only for messages")
        special = _adds_special_tokens(request)
        ids = await self._gateway.preparation.tokenize(
            model, request.text, "text", add_special_tokens=special, client=current_client.get()
        )
        return inference_pb2.TokenizeResponse(token_ids=ids)

    async def _chat_token_ids(self, model: ServedModel, request: inference_pb2.TokenizeRequest) -> list[int]:
        if request.text:
            raise InvalidArgumentError("text", "set either text or messages, not both")
        if request.add_special_tokens:
            raise InvalidArgumentError("add_special_tokens", "is not for messages: the chat template writes them")
        asks = request.add_generation_prompt if request.HasField("add_generation_prompt") else None
        chat = inference_pb2.ChatRequest(
            messages=request.messages,
            tools=request.tools,
            chat_template_kwargs=request.chat_template_kwargs,
            add_generation_prompt=asks,
            continue_final_message=request.continue_final_message,
            chat_template=request.chat_template,
        )
        check_messages(len(chat.messages), model.limits, "messages")
        chat_prompt, client = self._gateway.preparation.chat_prompt, current_client.get()
        return (await chat_prompt(model, conversation(chat), has_answer=False, client=client)).token_ids

    async def Detokenize(  # noqa: N802
        self, request: inference_pb2.DetokenizeRequest, _context: Context
    ) -> inference_pb2.DetokenizeResponse:
        self._gateway.admission.charge(current_client.get())
        model = self._gateway.admission.served(request.model)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        text = await self._gateway.preparation.detokenize(
            model, request.token_ids, "token_ids", skip_special_tokens=skip, client=current_client.get()
        )
        return inference_pb2.DetokenizeResponse(text=text)

    async def ListModels(  # noqa: N802
        self, _request: inference_pb2.ListModelsRequest, _context: Context
    ) -> inference_pb2.ListModelsResponse:
        models = [
            inference_pb2.Model(id=name, max_model_len=model.limits.max_model_len)
            for name, model in self._gateway.admission.models().items()
        ]
        return inference_pb2.ListModelsResponse(models=models)

    async def _prompt(
        self, model: ServedModel, request: inference_pb2.GenerateRequest, keep: int | None = None
    ) -> Prompt:
        if request.prompt and request.prompt_token_ids:
            raise InvalidArgumentError("prompt_token_ids", "set either prompt or prompt_token_ids, not both")
        given = list(request.prompt_token_ids) or request.prompt
        field = "prompt_token_ids" if request.prompt_token_ids else "prompt"
        special = _adds_special_tokens(request)
        prepare, client = self._gateway.preparation.prompts, current_client.get()
        return (await prepare(model, [given], field, add_special_tokens=special, keep=keep, client=client))[0]

    async def _chat_prompt(self, model: ServedModel, request: inference_pb2.ChatRequest, keep: int | None) -> Prompt:
        check_messages(len(request.messages), model.limits, "messages")
        chat_prompt, client = self._gateway.preparation.chat_prompt, current_client.get()
        return await chat_prompt(model, conversation(request), keep=keep, client=client)

    async def _answer(
        self,
        request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest,
        make_prompt: Callable[[ServedModel, int | None], Awaitable[Prompt]],
        context: Context,
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        arrived_at, gateway, client = time.monotonic(), self._gateway, current_client.get()
        with gateway.admission.running("grpc", context.time_remaining(), client):
            model = await gateway.admission.serving(request.model)
            sampling = given_fields(request.sampling_params)
            prompt = await make_prompt(model, kept_tokens(sampling, model.limits, name=_field_name))
            choices = value_of(request.choices, Choices)
            choices.check(_choices_field)
            if choices.are_compared:
                sampling.setdefault("logprobs", 0)  # they decide which are the best
            metadata = _metadata(context)
            hints = call_hints(metadata)
            requests = gateway.preparation.requests(
                model,
                [prompt],
                sampling,
                request_id=_request_id(request.request_id, metadata),
                cache_salt=request.cache_salt,
                retain=_retain(request),
                priority=request.priority,
                slo=gateway.admission.slo(client, _targets(request), hints.targets),
                arrived_at=arrived_at,
                timeout_s=context.time_remaining(),
                name=_field_name,
                client=client,
                hints=hints,
                choices=choices,
                choices_name=_choices_field,
                is_whole=choices.are_compared,
            )
            first = requests[0]
            check = gateway.preparation.check_guided
            await check(first.sampling_params, first.sampling_field, first.tools, first.form, client)
            shows_logprobs = request.sampling_params.HasField("logprobs")
            with (
                gateway.generation.charged(requests, _choices_field(choices.field())),
                gateway.admission.gate.bytes_held() as held,
            ):
                outputs = gateway.generation.outputs(requests, held.grow)
                if choices.are_compared:
                    outputs = likeliest(outputs, choices, held.grow)
                async with aclosing(outputs):
                    async for index, output in outputs:
                        yield _response(first, index, output, shows_logprobs=shows_logprobs)


def _adds_special_tokens(
    request: inference_pb2.GenerateRequest
    | inference_pb2.EmbedRequest
    | inference_pb2.Prefix
    | inference_pb2.TokenizeRequest,
) -> bool:
    return request.add_special_tokens if request.HasField("add_special_tokens") else True


def _retain(request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest) -> Retain | None:
    return Retain(request.retain.seconds, request.retain.num_tokens) if request.HasField("retain") else None


def _targets(request: inference_pb2.GenerateRequest | inference_pb2.ChatRequest) -> GivenTargets:
    targets = value_of(request.slo, LatencyTargets) if request.HasField("slo") else None
    if targets is not None:
        check_targets(targets)
    return given_in_body(targets, request.slo_class)


def _request_id(given: str, metadata: dict[str, str]) -> str:
    """The id in the message, or else the one beside it, as proxies write it; empty if there is none. Raises
    `InvalidArgumentError`."""
    found = metadata.get(REQUEST_ID_HEADER, "")
    if given or not found:
        return given
    check_request_id(found, REQUEST_ID_HEADER)
    return found


def _metadata(context: Context) -> dict[str, str]:
    """The call's metadata whose values are text."""
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}


def _response(
    request: GenerationRequest, index: int, output: Output, *, shows_logprobs: bool
) -> inference_pb2.GenerateResponse:
    if output.is_only_text and not shows_logprobs and output.logprob is None:  # most of an answer
        return inference_pb2.GenerateResponse(
            request_id=request.request_id,
            index=index,
            text=output.text,
            token_ids=[token.token_id for token in output.tokens],
            model=request.model.limits.model,
        )
    return inference_pb2.GenerateResponse(
        request_id=request.request_id,
        index=index,
        text=output.text,
        token_ids=[token.token_id for token in output.tokens],
        logprobs=[token_to_proto(token) for token in output.tokens] if shows_logprobs else [],
        prompt_logprobs=[token_to_proto(token) for token in output.prompt_logprobs],
        cumulative_logprob=output.logprob,
        finish_reason=finish_reason_to_proto(output.finish_reason),
        stop_reason="" if output.stop_reason is None else str(output.stop_reason),
        model=request.model.limits.model,
        usage=output.usage,
        report=output.report,
        reasoning=output.reasoning,
        tool_calls=[
            inference_pb2.ToolCallDelta(index=call.index, id=call.call_id, name=call.name, arguments=call.arguments)
            for call in output.tool_calls
        ],
    )
