"""An engine in this process and this thread: it computes while somebody waits for answers, and only then."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import closing, suppress
from typing import TypeVar, cast

from baton.client.messages import Calls, ToolCallDelta
from baton.client.report import RequestReport, Result, Usage
from baton.client.requests import chat_messages, template_options, tool_choice_message, tool_messages
from baton.offline.backend import Answer, Ask, Beams, Chat, Vector
from common.beam_search import BeamSearch, BeamSearchParams
from common.choices import Choices
from common.config import EngineSettings
from common.errors import InvalidArgumentError, UnavailableError, error_of
from common.model_files import tokenizer_files
from common.sampling import SamplingParams, kept_tokens
from common.types import SampledToken, TokenLogprob
from common.validation import ModelLimits
from engine import messages as m
from engine.core import EngineCore
from engine.loading.embedded_model import ensure_model
from engine.local.device import LocalDevice
from engine.local.drafter import load_drafter
from engine.sampling.grammars import GrammarCompiler
from kv_store.no_store import NoStore
from protos.baton.v1 import inference_pb2
from router.api.grpc_chat import conversation
from router.fleet.served_model import ServedModel
from router.limits.targets import Slo
from router.preparing.preparation import Preparation
from router.running.request import GenerationRequest, Prompt
from router.running.threads import TextThreads
from text.answer_reader import AnswerReader
from text.chat_template import ChatTemplate
from text.tokenizer import load_tokenizer

log = logging.getLogger(__name__)

IDLE_S = 0.05  # wait for a grammar that is being compiled, before the engine looks again

ResultT = TypeVar("ResultT")


class _AtOnce(TextThreads):
    """Nobody else waits here, so texts of any length are worked on at once."""

    async def run(self, size: int, work: Callable[[], ResultT], client: object = None) -> ResultT:  # noqa: ARG002
        return work()


class _Live:
    """One answer under way."""

    def __init__(self, index: int, candidate: int, request: GenerationRequest) -> None:
        self.request = request
        self._index = index
        self._candidate = candidate
        self._reader = AnswerReader(
            request.model.tokenizer, request.prompt_token_ids, request.sampling_params, request.reading
        )
        self._texts: list[str] = []
        self._reasoning: list[str] = []
        self._calls = Calls()
        self._tokens: list[SampledToken] = []
        self._scores: list[SampledToken] = []

    @property
    def command(self) -> m.AddRequest:
        request = self.request
        return m.AddRequest(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=request.sampling_params,
            priority=request.priority,
            targets=request.slo.targets,
            asked_time=request.arrived_at,
        )

    def add_scores(self, event: m.PromptScored) -> None:
        self._scores += event.scores

    def add(self, event: m.TokensGenerated) -> Answer | None:
        """The whole answer, if it ends with these tokens."""
        new = self._reader.add(event.tokens, event.finish_reason, event.stop_token_id)
        self._tokens += event.tokens[: new.num_tokens]
        self._texts.append(new.pieces.content)
        self._reasoning.append(new.pieces.reasoning)
        self._calls.deltas += [
            ToolCallDelta(one.index, one.call_id, one.name, one.arguments) for one in new.pieces.calls
        ]
        if new.finish_reason is None:
            return None
        request, tokens = self.request, tuple(self._tokens)
        result = Result(
            request_id=request.request_id,
            model=request.model.limits.model,
            text="".join(self._texts),
            token_ids=tuple(token.token_id for token in tokens),
            logprobs=() if request.sampling_params.logprobs is None else tokens,
            finish_reason=new.finish_reason,
            stop_reason="" if new.stop_reason is None else str(new.stop_reason),
            reasoning="".join(self._reasoning),
            tool_calls=self._calls.whole(),
            prompt_logprobs=tuple(self._scores),
            usage=Usage(
                prompt_tokens=len(request.prompt_token_ids),
                completion_tokens=len(tokens),
                cached_tokens=event.num_cached_tokens,
            ),
            report=RequestReport(
                num_preemptions=event.num_preemptions,
                num_drafted_tokens=event.num_drafted_tokens,
                num_accepted_tokens=event.num_accepted_tokens,
                notes=request.notes,
            ),
        )
        return Answer(self._index, self._candidate, request.prompt_token_ids, result)


class LocalEngine:
    """Several threads may use it: one after the other."""

    def __init__(self, settings: EngineSettings) -> None:
        """Loads the model. Raises `StartupError`."""
        model_dir = ensure_model(settings.model, settings.cache_dir, log.info)
        tokenizer = load_tokenizer(tokenizer_files(model_dir))
        runner = LocalDevice(model_dir, settings, raises=True)
        runner.warm_up()
        self._lock = threading.Lock()
        self._woken = threading.Event()
        self._settings, self._device = settings, runner
        self._compile_grammar = GrammarCompiler(
            model_dir / "tokenizer.json", runner.info.vocab_size, runner.info.eos_token_ids
        )
        self._drafter = load_drafter(settings, runner)
        self._made_core: EngineCore | None = self._make_core()
        self._has_priorities = settings.takes_priorities
        limits = ModelLimits(
            model=settings.served_model_name or settings.model,
            max_model_len=runner.info.max_model_len,
            vocab_size=runner.info.vocab_size,
            max_token_bytes=tokenizer.max_token_bytes,
            is_token=tokenizer.is_token,
        )
        self._model = ServedModel(
            limits,
            runner.info.spec.fingerprint(),
            runner.info.spec.fingerprint_but_dtype(),
            runner.info.spec.dtype,
            frozenset(runner.info.eos_token_ids),
            tokenizer,
            runner.info.spec.block_size,
        )
        self._preparation = Preparation(
            request_timeout_s=float("inf"),
            control_tokens=False,
            threads=_AtOnce(),
            max_answer_tokens=sys.maxsize,
            make_template=_template,
        )

    def _make_core(self) -> EngineCore:
        return EngineCore(
            self._settings.model_copy(update={"run_ahead": False}),  # this thread computes: it has nothing to do beside
            self._device,
            NoStore(),
            time.monotonic,
            self._woken.set,
            compile_grammar=self._compile_grammar,
            drafter=self._drafter,
        )

    @property
    def _core(self) -> EngineCore:
        """Another one, with an empty cache, if the one before was interrupted in the middle of something."""
        if self._made_core is None:
            self._drafter = None if self._drafter is None else self._drafter.anew()
            self._made_core = self._make_core()
        return self._made_core

    def close(self) -> None:
        if self._made_core is not None:
            self._made_core.close()

    def chat_token_ids(self, chat: Chat) -> list[int]:
        request = conversation(_chat_request(chat))
        return _done(self._preparation.chat_prompt(self._model, request, has_answer=False)).token_ids

    def text(self, token_ids: Sequence[int]) -> str:
        return self._model.tokenizer.decode(token_ids)

    def token_text(self, token_id: int) -> str:
        return self._model.tokenizer.decode([token_id], skip_special_tokens=False)

    # -------------------------------------------------------------------------------------------- answers

    def answers(self, asks: Sequence[Ask]) -> Generator[Answer, None, None]:
        live: dict[str, _Live] = {}
        for index, ask in enumerate(asks):
            for candidate, request in enumerate(self._prepare(ask)):
                live[request.request_id] = _Live(index, candidate, request)
        with closing(self._events([one.command for one in live.values()], live)) as events:
            for event in events:
                under_way = live.get(event.request_id)
                if under_way is None:
                    continue  # a stop string ended it before its last tokens came
                match event:
                    case m.PromptScored():
                        under_way.add_scores(event)
                    case m.TokensGenerated():
                        if (answer := under_way.add(event)) is not None:
                            del live[event.request_id]
                            self._core.handle(m.Release(event.request_id))
                            yield answer
                    case m.RequestFailed():
                        field = under_way.request.client_field(event.field)
                        raise error_of(event.grpc_code, event.reason, field=field)

    def _prepare(self, ask: Ask) -> list[GenerationRequest]:
        """One for each of its answers."""
        self._check_priority(ask.priority)
        if ask.slo_class:
            raise InvalidArgumentError("slo_class", "is for target, whose router knows the classes")
        keep = kept_tokens(ask.params.options, self._model.limits)
        if isinstance(ask.prompt, Chat):
            prompt = _done(
                self._preparation.chat_prompt(self._model, conversation(_chat_request(ask.prompt)), ask.name, keep=keep)
            )
        else:
            prompt = self._prompt(ask.prompt, ask.name, keep=keep)
        requests = self._preparation.requests(
            self._model,
            [prompt],
            ask.params.options,
            priority=ask.priority,
            slo=Slo(ask.slo),
            arrived_at=time.monotonic(),
            choices=Choices(n=ask.params.num_candidates),
        )
        first = requests[0]
        _done(self._preparation.check_guided(first.sampling_params, first.sampling_field, first.tools, first.form))
        return requests

    def _prompt(
        self, prompt: str | list[int], name: str, *, has_answer: bool = True, keep: int | None = None
    ) -> Prompt:
        return _done(self._preparation.prompts(self._model, [prompt], name, has_answer=has_answer, keep=keep))[0]

    def _check_priority(self, priority: int) -> None:
        if priority and not self._has_priorities:
            raise InvalidArgumentError(
                "priority", f'must be 0, not {priority}: requests run in their order unless queue_policy is "priority"'
            )

    # ----------------------------------------------------------------------------------------- embeddings

    def vectors(
        self, prompts: Sequence[str | list[int]], *, pooling: str, dimensions: int, normalize: bool
    ) -> Generator[Vector, None, None]:
        if pooling not in tuple(m.Pooling):
            raise InvalidArgumentError("pooling", f"must be {' or '.join(m.Pooling)}, not {pooling!r}")
        made = [self._prompt(prompt, f"prompts[{index}]", has_answer=False) for index, prompt in enumerate(prompts)]
        request = self._preparation.embed_request(
            self._model, made, dimensions=dimensions, normalize=normalize, arrived_at=time.monotonic()
        )
        commands = [
            m.Embed(
                request_id=f"{request.request_id}-{index}",
                prompt_token_ids=prompt.token_ids,
                pooling=m.Pooling(pooling),
                dimensions=dimensions,
                normalize=normalize,
            )
            for index, prompt in enumerate(made)
        ]
        live = {command.request_id: index for index, command in enumerate(commands)}
        with closing(self._events(commands, live)) as events:
            for event in events:
                match event:
                    case m.Embedded(request_id, values):
                        index = live.pop(request_id)
                        yield Vector(index, made[index].token_ids, values)
                    case m.RequestFailed():
                        raise error_of(event.grpc_code, event.reason, field=event.field)

    # ---------------------------------------------------------------------------------------- beam search

    def beams(self, prompts: Sequence[str | list[int]], params: BeamSearchParams) -> Generator[Beams, None, None]:
        """All prompts go on together, a token at a time: each sequence is a request for its next token, which finds all
        full blocks before it in the prefix cache."""
        made = [self._prompt(prompt, f"prompts[{index}]").token_ids for index, prompt in enumerate(prompts)]
        for token_ids in made:
            if len(token_ids) + params.max_tokens > (most := self._model.limits.max_model_len):
                reason = f"{len(token_ids)} prompt tokens and {params.max_tokens} exceed the model's context of {most}"
                raise InvalidArgumentError("max_tokens", reason)
        open_searches = {index: BeamSearch(params, self._model.eos_token_ids) for index in range(len(made))}
        while open_searches:
            sequences = [
                [*made[index], *beam.token_ids] for index, search in open_searches.items() for beam in search.running
            ]
            num_next = next(iter(open_searches.values())).num_next
            next_tokens = iter(self._next_tokens(sequences, num_next))
            for index, search in list(open_searches.items()):
                search.advance([next(next_tokens) for _ in search.running])
                if not search.running:
                    del open_searches[index]
                    yield Beams(index, made[index], search.finished)

    def _next_tokens(self, sequences: Sequence[list[int]], num_next: int) -> list[Sequence[TokenLogprob]]:
        """The likeliest next tokens of each sequence."""
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=num_next)
        commands = [
            m.AddRequest(request_id=f"beam-{number}", prompt_token_ids=token_ids, sampling_params=params)
            for number, token_ids in enumerate(sequences)
        ]
        live = {command.request_id: number for number, command in enumerate(commands)}
        found: list[Sequence[TokenLogprob]] = [()] * len(sequences)
        with closing(self._events(commands, live)) as events:
            for event in events:
                match event:
                    case m.TokensGenerated(request_id=request_id, tokens=[token]):
                        found[live.pop(request_id)] = token.top_logprobs
                    case m.RequestFailed():
                        raise error_of(event.grpc_code, event.reason, field=event.field)
        return found

    # --------------------------------------------------------------------------------------------- engine

    def _events(
        self, commands: Sequence[m.AddRequest | m.Embed], live: Mapping[str, object]
    ) -> Generator[m.TokensGenerated | m.PromptScored | m.Embedded | m.RequestFailed, None, None]:
        """Runs the engine until the caller has taken every request out of `live`; those that are left if the caller
        stops before are released.

        An exception passes as it is: it may be of the caller, raised by a handler of signals in the middle of any line,
        as Ctrl-C and time limits are. The engine is made anew then, since nobody knows what it was doing.
        """
        with self._lock:
            core = self._core
            try:
                yield from self._run(core, commands, live)
            except GeneratorExit:
                raise
            except BaseException:
                self._made_core = None
                with suppress(Exception):  # of what it was doing
                    core.close()
                raise

    def _run(
        self, core: EngineCore, commands: Sequence[m.AddRequest | m.Embed], live: Mapping[str, object]
    ) -> Generator[m.TokensGenerated | m.PromptScored | m.Embedded | m.RequestFailed, None, None]:
        for command in commands:
            core.handle(command)
        try:
            while live:
                has_computed = core.step()
                events = core.take_events()
                core.take_block_news()
                for event in events:
                    if isinstance(event, m.TokensGenerated | m.PromptScored | m.Embedded | m.RequestFailed):
                        yield event
                if not has_computed and not events:
                    self._woken.wait(IDLE_S)
                    self._woken.clear()
        except GeneratorExit:  # between two steps
            for request_id in live:
                core.handle(m.Release(request_id))
            if core.scheduler.check_integrity():  # the caller was interrupted while it released a request
                self._made_core = None
            raise
        finally:
            core.take_events()


def _chat_request(chat: Chat) -> inference_pb2.ChatRequest:
    return inference_pb2.ChatRequest(
        messages=chat_messages(chat.messages),
        tools=tool_messages(chat.tools),
        tool_choice=tool_choice_message(chat.tool_choice, chat.allowed_tools),
        parallel_tool_calls=chat.parallel_tool_calls,
        chat_template_kwargs=template_options(chat.template_options),
        add_generation_prompt=chat.add_generation_prompt,
        continue_final_message=chat.continue_final_message,
        chat_template=chat.chat_template,
    )


def _template(source: str, special_tokens: Mapping[str, str], _max_chars: int) -> ChatTemplate:
    """The caller's own, rendered in this process: who wrote it waits for it."""
    try:
        return ChatTemplate(source, special_tokens, name="the chat template given")
    except UnavailableError as error:
        raise InvalidArgumentError("chat_template", error.reason) from error


def _done(work: Coroutine[None, None, ResultT]) -> ResultT:
    """What a coroutine returns that waits for nothing: no event loop is needed, and one of the caller's may run."""
    try:
        work.send(None)
    except StopIteration as end:
        return cast("ResultT", end.value)
    work.close()
    raise RuntimeError("the coroutine waits for something")
