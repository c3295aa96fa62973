"""From what a client wrote to a request that workers take: validated, rendered, tokenized."""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from common import metrics
from common.cache_hints import Retain, check_num_tokens, check_retain, check_retain_s
from common.choices import Choices
from common.errors import InvalidArgumentError, OverloadedError
from common.guided import Guided
from common.sampling import FieldName, GivenSampling, SamplingParams, checked, fitted
from common.tracing import Traced
from common.validation import (
    check_cache_salt,
    check_messages,
    check_priority,
    check_prompt,
    check_request_id,
    check_text,
    check_token_count,
    check_token_ids,
    encoded,
)
from protos.baton.v1 import embed_pb2
from router.fleet.served_model import ServedModel
from router.limits.clients import NOBODY, ApiClient, CallHints, Charge
from router.limits.targets import NO_SLO, Slo
from router.preparing.answer_budget import AnswerBudget
from router.preparing.bad_words import bad_words_ids
from router.preparing.guided import Grammars
from router.preparing.sampling_size import check_size
from router.running.beams import beam_params, beam_sampling
from router.running.embedding import MAX_DIMENSIONS, EmbedRequest, check_num_values
from router.running.prefix_hints import PrefixHint
from router.running.request import GenerationRequest, Prompt, SamplingMessages, new_request_id
from router.running.room import Room
from router.running.threads import SHORT, TextThreads
from text import generic_tools
from text.answer_form import AnswerForm
from text.chat_template import BaseTemplate
from text.conversation import Conversation, Tools, read_through
from text.template_process import FIELD as TEMPLATE_FIELD
from text.template_process import MAX_CHARS as MAX_TEMPLATE_CHARS
from text.tokenizer import ChatForm

ResultT = TypeVar("ResultT")
MakeTemplate = Callable[[str, Mapping[str, str], int], BaseTemplate]
"""From a client's template, the special tokens and the most characters of a prompt. Raises `InvalidArgumentError`."""

BeginTrace = Callable[[str, str], Traced | None]
"""Makes a span of what a client says in traceparent and tracestate; None if the request is not sampled."""


def never_traced(_traceparent: str, _tracestate: str) -> None:
    return None


ONE_ANSWER = Choices()
MAX_TEMPLATE_WAIT_S = 10.0  # for others' templates; each of them takes a second of computing at most
VALUE_CHARS = 12  # rendering a value of JSON takes about as long as tokenizing this many characters


class Preparation:
    """Shared by both interfaces of a router. Counts and sizes are checked before any work is done on a text, and long
    texts are worked on in `threads`, one of a request at a time. Grammars are parsed in `grammar_threads`."""

    def __init__(
        self,
        *,
        request_timeout_s: float,
        control_tokens: bool,
        threads: TextThreads,
        grammar_threads: TextThreads | None = None,
        template_threads: TextThreads | None = None,
        make_template: MakeTemplate | None = None,
        max_answer_tokens: int | None = None,
        max_retain_s: float = math.inf,
        generic_tools: bool = True,
        begin_trace: BeginTrace | None = None,
    ) -> None:
        """`control_tokens`: whether text of control tokens in messages becomes control tokens. `max_answer_tokens`: see
        `AnswerBudget`. `max_retain_s`: for so long a request may have its prompt's KV retained.
        `generic_tools`: whether tools are told in words to models that have no form for them.
        `make_template`: of templates that come with requests, which wait for each other in `template_threads`; if None,
        no request may bring one. `begin_trace` decides
        whether a body's requests are traced."""
        self._begin_trace = begin_trace or never_traced
        self._request_timeout_s = request_timeout_s
        self._max_answer_tokens = max_answer_tokens
        self.max_retain_s = max_retain_s
        self._control_tokens = control_tokens
        self._generic_tools = generic_tools
        self._threads = threads
        self._grammars = Grammars(grammar_threads or threads)
        self._template_threads = template_threads or threads
        self._make_template = make_template

    async def prompts(
        self,
        model: ServedModel,
        prompts: Sequence[str | list[int]],
        field: str,
        *,
        add_special_tokens: bool = True,
        has_answer: bool = True,
        keep: int | None = None,
        client: ApiClient | None = None,
    ) -> list[Prompt]:
        """Each prompt is a text or token ids. The first prompt that is wrong or too long raises an error, and none
        after it is tokenized. An embedding has no answer, so its prompt may fill the model's context. `keep`: of each
        prompt so many tokens at most, the last ones (`kept_tokens`). `client`: whose turn long ones take."""
        size = 0
        for prompt in prompts:
            if isinstance(prompt, str):
                check_text(prompt, model.limits, field)
                size += len(prompt)
            else:
                check_prompt(_last(prompt, keep), model.limits, field, has_answer=has_answer)
        made = []
        for prompt in prompts:
            token_ids = prompt
            if isinstance(token_ids, str):
                encode = partial(model.tokenizer.encode, token_ids, add_special_tokens=add_special_tokens)
                token_ids = await self._threads.run(size, encode, client)
            kept = _last(token_ids, keep)
            if isinstance(prompt, str):
                check_prompt(kept, model.limits, field, has_answer=has_answer)
            made.append(Prompt(kept, field, is_cut=len(kept) < len(token_ids)))
        return made

    async def chat_prompt(
        self,
        model: ServedModel,
        conversation: Conversation,
        field: str = "messages",
        *,
        has_answer: bool = True,
        keep: int | None = None,
        client: ApiClient | None = None,
    ) -> Prompt:
        """The template writes special tokens out itself, so none are added. `field`: the client's name for messages.
        `has_answer`, `keep`, `client`: see `prompts`."""
        messages, tools = conversation.messages, conversation.tools
        check_messages(len(messages), model.limits, field)
        texts, num_values = read_through([list(messages), dict(conversation.template_options)])
        total = "".join(texts)
        if total:
            check_text(total, model.limits, field)
        described, num_of_tools = "", 0
        if tools.tools:
            texts, num_of_tools = read_through([tool.as_json() for tool in tools.tools])
            described = "".join(texts)
            check_text(described, model.limits, "tools")
        form = await self._form(model, conversation, client)
        answers, free, notes = form.answers, None, _notes(conversation)
        if self._generic_tools and form.needs_generic_tools(conversation):
            size = 0 if model.tokenizer.has_generic_answers(form) else SHORT + 1
            answers = await self._threads.run(size, partial(model.tokenizer.generic_answers, form), client)
            conversation = replace(conversation, has_generic_tools=True)
            notes.append(generic_tools.NOTE)
        if tools.shown and not tools.is_forced:
            if answers is None or not answers.knows_calls:
                raise InvalidArgumentError("tools", "the shape in which this model writes calls of tools is not known")
            free = answers.strict.format(tools)
        encode = partial(
            model.tokenizer.encode_chat,
            conversation,
            control_tokens=self._control_tokens,
            check=lambda text: check_text(text, model.limits, TEMPLATE_FIELD if conversation.chat_template else field),
            form=form,
        )
        size = len(total) + len(described) + VALUE_CHARS * (num_values + num_of_tools)
        try:
            if conversation.chat_template:
                token_ids, text = await self._in_turn(encode, client)
            else:
                token_ids, text = await self._threads.run(size, encode, client)
        except InvalidArgumentError as error:
            raise InvalidArgumentError(field if error.field == "messages" else error.field, error.reason) from error
        token_ids = _last(token_ids, keep)
        check_prompt(token_ids, model.limits, field, has_answer=has_answer)
        if answers is None:
            return Prompt(token_ids, field, AnswerForm(tools=tools), notes=tuple(notes))
        continued = conversation.continued
        if continued is None and not (conversation.asks_answer or form.always_asks_answer):
            text = ""  # nothing of the answer is written: what the messages end with is not its beginning
        answer = AnswerForm(
            tools=tools,
            reading=answers.reading(text, tools, continued),
            thought=answers.thought(text, continued),
            calls=answers.strict if tools.shown else None,
            free=free,
            tokens=answers.tokens,
        )
        return Prompt(token_ids, field, answer, notes=tuple(notes))

    async def _form(self, model: ServedModel, conversation: Conversation, client: ApiClient | None) -> ChatForm:
        """How the conversation is written, and its answer read."""
        tokenizer, source = model.tokenizer, conversation.chat_template
        if not source:
            return tokenizer.chat_form(conversation.tools)
        if self._make_template is None:
            reason = "is not allowed: --trust-request-chat-template of the router is off"
            raise InvalidArgumentError(TEMPLATE_FIELD, reason)
        if len(source) > MAX_TEMPLATE_CHARS:
            reason = f"must have at most {MAX_TEMPLATE_CHARS} characters, not {len(source)}"
            raise InvalidArgumentError(TEMPLATE_FIELD, reason)
        encoded(source, TEMPLATE_FIELD)
        make = partial(self._make_template, source, tokenizer.special_tokens, model.limits.max_prompt_bytes)
        return await self._in_turn(lambda: tokenizer.form_of(make()), client)

    async def _in_turn(self, work: Callable[[], ResultT], client: ApiClient | None) -> ResultT:
        """Work on a template that came with a request. Raises `OverloadedError` if others' took all the time that this
        one may wait."""
        begin_by = time.monotonic() + MAX_TEMPLATE_WAIT_S

        def begin() -> ResultT:
            if time.monotonic() > begin_by:
                metrics.router_refused.labels("templates").inc()
                raise OverloadedError("others' chat templates are being rendered, try again later")
            return work()

        return await self._template_threads.run(SHORT + 1, begin, client)

    async def check_guided(
        self,
        params: SamplingParams,
        name: FieldName,
        tools: Tools | None = None,
        form: Guided | None = None,
        client: ApiClient | None = None,
    ) -> None:
        """Parses the grammar of guided text; `tools`, `form` and `client` are the request's. Raises
        `InvalidArgumentError`. A worker may still refuse the grammar, for example for a token that its model lacks."""
        if params.guided is not None:
            await self._grammars.check(params.guided, name, tools, form, client)

    async def tokenize(
        self,
        model: ServedModel,
        text: str,
        field: str,
        *,
        add_special_tokens: bool,
        client: ApiClient | None = None,
    ) -> list[int]:
        if text:
            check_text(text, model.limits, field)
        encode = partial(model.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await self._threads.run(len(text), encode, client)

    async def detokenize(
        self,
        model: ServedModel,
        token_ids: Sequence[int],
        field: str,
        *,
        skip_special_tokens: bool,
        client: ApiClient | None = None,
    ) -> str:
        check_token_count(len(token_ids), model.limits, field)
        check_token_ids(token_ids, model.limits, field)
        decode = partial(model.tokenizer.decode, token_ids, skip_special_tokens=skip_special_tokens)
        return await self._threads.run(len(token_ids), decode, client)

    def requests(
        self,
        model: ServedModel,
        prompts: Sequence[Prompt],
        sampling: GivenSampling,
        *,
        request_id: str = "",
        cache_salt: str = "",
        retain: Retain | None = None,
        priority: int = 0,
        slo: Slo = NO_SLO,
        arrived_at: float,
        timeout_s: float | None = None,
        default_max_tokens: int | None = None,
        name: FieldName = str,
        client: ApiClient | None = None,
        hints: CallHints | None = None,
        room: Room | None = None,
        choices: Choices = ONE_ANSWER,
        choices_name: FieldName = str,
        is_whole: bool = False,
    ) -> list[GenerationRequest]:
        """One for each answer to each of a body's prompts; answers to one prompt are side by side. Validates all of it,
        `sampling` once. `timeout_s` is the client's own deadline, counted from `arrived_at` and no longer than the
        router's; `client` is whose key came with the request, `hints` what came beside it, `room` that of a batch;
        `slo` are latency targets, checked; `choices` are asked for to each prompt, and `choices_name` says how the
        client calls their fields. `is_whole`: whether answers are kept until they are whole."""
        if request_id:
            check_request_id(request_id)
        check_cache_salt(cache_salt)
        check_priority(priority)
        if retain is not None:
            check_retain(retain, self.max_retain_s)
        form, reading, tools = None, None, None
        if (answer := prompts[0].answer) is not None:  # of a chat, which has one prompt
            form = None if sampling.get("guided") is None else _checked(model, sampling, name).guided
            if form is None or answer.tools.is_forced:
                form, name = None, _blaming_tools(name)
            guided, reading = answer.with_form(form, name)
            if guided is not None:
                sampling, tools = {**sampling, "guided": guided}, answer.tools if answer.tools.shown else None
            form = None if guided == form else form
        if choices.use_beam_search:
            sampling = beam_sampling(sampling, name)
        params, wire = _checked(model, sampling, name), SamplingMessages()
        traced = self._begin_trace(hints.traceparent, hints.tracestate) if hints is not None else None
        made: list[GenerationRequest] = []
        for number, prompt in enumerate(prompts):
            own = self._fitted(
                params,
                sampling,
                model,
                prompt,
                choices,
                num_answers=len(prompts) * choices.num_candidates,
                default_max_tokens=default_max_tokens,
                is_whole=is_whole,
                name=name,
            )
            beams = beam_params(choices, own, model.eos_token_ids, choices_name) if choices.use_beam_search else None
            request = GenerationRequest(
                request_id=request_id or new_request_id(),
                model=model,
                prompt_token_ids=prompt.token_ids,
                sampling_params=own,
                sampling_messages=wire,
                cache_salt=client.cache_salt(cache_salt) if client else cache_salt,
                retain=retain,
                priority=priority,
                slo=slo,
                arrived_at=arrived_at,
                deadline=arrived_at + min(self._request_timeout_s, math.inf if timeout_s is None else timeout_s),
                client=client or NOBODY,
                session=_session(client, hints),
                room=room,
                notes=prompt.notes,
                explain=hints is not None and hints.explain,
                prompt_field=prompt.field,
                operation="text_completion" if prompt.answer is None else "chat",
                reading=reading,
                form=form,
                tools=tools,
                sampling_field=name,
                beams=beams,
                charge=Charge(len(prompt.token_ids)),
                traced=traced if traced is None or not made else traced.sibling(),
                picked=hints.picked if hints is not None and not made else "",
            )
            first = number * choices.num_candidates
            made += [request.numbered(first + one, is_first=one == 0) for one in range(choices.num_candidates)]
        return made

    def _fitted(
        self,
        params: SamplingParams,
        sampling: GivenSampling,
        model: ServedModel,
        prompt: Prompt,
        choices: Choices,
        *,
        num_answers: int,
        default_max_tokens: int | None,
        is_whole: bool,
        name: FieldName,
    ) -> SamplingParams:
        """`params`, made of `sampling`, for one prompt of a body that asks for so many answers in all."""
        budget = AnswerBudget.of(
            model,
            sampling,
            choices,
            max_answer_tokens=self._max_answer_tokens,
            num_answers=num_answers,
            num_prompt_tokens=len(prompt.token_ids),
            is_whole=is_whole,
            name=name,
        )
        most = budget.most()
        own = fitted(
            params,
            sampling,
            model.limits,
            num_prompt_tokens=len(prompt.token_ids),
            draw_seed=lambda: secrets.randbits(63),
            default_max_tokens=most if default_max_tokens is None else min(default_max_tokens, most),
            name=name,
        )
        budget.check(own, is_max_given="max_tokens" in sampling)
        return own

    def prefix_hint(
        self,
        model: ServedModel,
        prompt: Prompt,
        *,
        num_tokens: int = 0,
        cache_salt: str = "",
        seconds: float | None = None,
        client: ApiClient | None = None,
        hints: CallHints | None = None,
    ) -> PrefixHint:
        """The hint about the prompt's first `num_tokens` tokens; 0: all of them. `seconds` says how long to retain
        their KV, if that is what the client asks; 0: no longer."""
        check_cache_salt(cache_salt)
        check_num_tokens(num_tokens, "num_tokens")
        if seconds:
            check_retain_s(seconds, self.max_retain_s, "seconds")
        return PrefixHint(
            model=model,
            token_ids=prompt.token_ids[: num_tokens or len(prompt.token_ids)],
            cache_salt=client.cache_salt(cache_salt) if client else cache_salt,
            session=_session(client, hints),
            seconds=seconds or 0.0,
            client=client or NOBODY,
        )

    def embed_request(
        self,
        model: ServedModel,
        prompts: Sequence[Prompt],
        *,
        request_id: str = "",
        pooling: embed_pb2.Pooling.ValueType = embed_pb2.POOLING_LAST,
        dimensions: int = 0,
        normalize: bool = True,
        cache_salt: str = "",
        arrived_at: float,
        timeout_s: float | None = None,
        client: ApiClient | None = None,
        hints: CallHints | None = None,
    ) -> EmbedRequest:
        """The request for the embeddings of `prompts`, checked as `requests` checks its own. `dimensions` 0: all."""
        if request_id:
            check_request_id(request_id)
        check_cache_salt(cache_salt)
        if not 0 <= dimensions <= MAX_DIMENSIONS:
            raise InvalidArgumentError("dimensions", f"must be in [1, {MAX_DIMENSIONS}], not {dimensions}")
        request = EmbedRequest(
            request_id=request_id or new_request_id(),
            model=model,
            prompts=prompts,
            pooling=pooling,
            dimensions=dimensions,
            normalize=normalize,
            cache_salt=client.cache_salt(cache_salt) if client else cache_salt,
            arrived_at=arrived_at,
            deadline=arrived_at + min(self._request_timeout_s, math.inf if timeout_s is None else timeout_s),
            client=client or NOBODY,
            traced=self._begin_trace(hints.traceparent, hints.tracestate) if hints is not None else None,
        )
        check_num_values(request, dimensions)
        return request


def _last(token_ids: list[int], keep: int | None) -> list[int]:
    return token_ids if keep is None else token_ids[-keep:]


def _checked(model: ServedModel, sampling: GivenSampling, name: FieldName) -> SamplingParams:
    """All that holds for each prompt of a body."""
    params = checked(sampling, model.limits, name=name)
    if params.bad_words or params.bad_words_ids or params.guided:  # all others together are small enough
        check_size(params, name)
    if params.bad_words:
        params = replace(params, bad_words_ids=bad_words_ids(model, params, name))
        check_size(params, name, "bad_words")
    return params


def _blaming_tools(name: FieldName) -> FieldName:
    """The client's names for the parameters of an answer whose form the tools alone give."""
    return lambda given: "tools" if given == "guided" else name(given)


def _notes(conversation: Conversation) -> list[str]:
    """What the report says of the conversation as it came."""
    calls = [call for message in conversation.messages for call in message.get("tool_calls", ())]
    return [
        f"messages: the arguments of call {call['id']!r} are not the JSON text of an object; passed on as they are"
        for call in calls
        if isinstance(call["function"]["arguments"], str)
    ]


def _session(client: ApiClient | None, hints: CallHints | None) -> str:
    """The session as routing knows it; those of two tenants are never the same."""
    return json.dumps([client.tenant if client else "", hints.session]) if hints and hints.session else ""
