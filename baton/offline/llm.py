"""A model for programs: many prompts in, all answers out.

    from baton import LLM, SamplingParams

    with LLM("./Llama-3.2-1B-Instruct") as llm:
        for output in llm.generate(["The capital of Japan is", "2 + 2 ="], SamplingParams(temperature=0)):
            print(output.outputs[0].text)

The engine runs in this process and computes on the caller's thread. With `target`, a stack that runs somewhere answers
instead, prefill and decode on separate workers: `LLM(target="localhost:50051")`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any, Self, TypeVar

from tqdm.auto import tqdm

from baton.client.messages import Tool
from baton.client.sync_client import Client
from baton.offline.backend import Answer, Ask, Backend, Chat
from baton.offline.inputs import ChatMessages, Prompt, conversations_of, prompts_of, tools_of
from baton.offline.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    Embedding,
    EmbeddingRequestOutput,
    Logprob,
    Logprobs,
    RequestOutput,
)
from baton.offline.params import SamplingParams
from baton.settings import did_you_mean, load
from common.beam_search import Beam, BeamSearchParams
from common.config import DEFAULT_MODEL, EngineSettings
from common.errors import ConfigError, InvalidArgumentError, UnavailableError
from common.targets import LatencyTargets, check_targets
from common.types import SampledToken

ValueT = TypeVar("ValueT")

_OF_WORKERS = (
    "announce",
    "cpu_cores",
    "data_parallel_size",
    "engine_timeout",
    "expert_parallel_size",
    "host_index",
    "num_hosts",
    "pipeline_parallel_size",
    "ranks_address",
    "ranks_secret_file",
    "ranks_timeout",
    "tensor_parallel_size",
)  # settings of the processes around an engine
OPTIONS = frozenset(EngineSettings.model_fields) - set(_OF_WORKERS)
"""What `LLM` takes besides `target`: the engine's settings, as `baton worker --help` explains them."""


class LLM:
    """`options` are `OPTIONS`. Raises `ConfigError` for one that is wrong and `StartupError` if the model cannot be
    served as set. It is closed with its `with` block, by `close`, or with the process."""

    def __init__(self, model: str | None = None, *, target: str | Client | None = None, **options: Any) -> None:
        """`target`: a router's host:port, or a `Client` of it, which may have TLS, an API key and a time limit."""
        for name in options:
            if name not in OPTIONS:
                reason = "is for worker processes" if name in _OF_WORKERS else "no such option"
                raise ConfigError(name, reason + did_you_mean(name, OPTIONS))
        if model is not None:
            options["model"] = model
        if target is not None and options:
            raise ConfigError(next(iter(options)), "is decided where target runs")
        self._backend: Backend
        if target is None:
            from baton.offline.local import LocalEngine

            settings = load(EngineSettings, {"model": DEFAULT_MODEL, **options}, environ={}, spelled=str)
            if settings.slo_late == "refuse":
                reason = 'must be "best-effort", not "refuse": one prompt that is late would cost the answers of all'
                raise ConfigError("slo_late", reason)
            self._backend = LocalEngine(settings)
        else:
            from baton.offline.remote import RemoteStack

            self._backend = RemoteStack(Client(target) if isinstance(target, str) else target)
        self._close = weakref.finalize(self, self._backend.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives the model's memory back. No method can be called after it."""
        if self._close.alive:
            self._close()
            self._backend = _Closed()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Sequence[int] | None = None,
        slo: LatencyTargets | Sequence[LatencyTargets | None] | None = None,
        slo_class: str = "",
    ) -> list[RequestOutput]:
        """Continues prompts, in whatever order is fastest, and returns all answers in the order of the prompts.

        `sampling_params` and `slo`, latency targets, are one for all prompts, or one for each; `priority` is one for
        each. `slo_class` is a class of targets that the router of `target` knows. Raises `InvalidArgumentError`.
        """
        given = prompts_of(prompts)
        return self._answers(given, "prompts", sampling_params, priority, slo, slo_class, show_progress=use_tqdm)

    def chat(
        self,
        messages: ChatMessages | Sequence[ChatMessages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        tools: Sequence[Tool | Mapping[str, Any]] | None = None,
        tool_choice: str = "auto",
        allowed_tools: Sequence[str] = (),
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        priority: Sequence[int] | None = None,
        slo: LatencyTargets | Sequence[LatencyTargets | None] | None = None,
        slo_class: str = "",
    ) -> list[RequestOutput]:
        """Answers one conversation, or a list of several. Messages are (role, content) pairs, mappings as OpenAI's
        clients write them, or `Message`s; a text is one question. `tool_choice`: auto, none, required, or the name of
        the tool that has to be called. `allowed_tools`: those that may be called; empty: all. With
        `continue_final_message` each answer continues the last message, which is the assistant's. `chat_template`: in
        place of the model's; a program that is run in a sandbox, but may take any time."""
        made = tools_of(tools)
        chats = [
            Chat(
                messages=one,
                tools=made,
                tool_choice=tool_choice,
                allowed_tools=allowed_tools,
                parallel_tool_calls=parallel_tool_calls,
                template_options=chat_template_kwargs,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template or "",
            )
            for one in conversations_of(messages)
        ]
        return self._answers(chats, "messages", sampling_params, priority, slo, slo_class, show_progress=use_tqdm)

    def tokenize_chat(
        self,
        messages: ChatMessages,
        *,
        tools: Sequence[Tool | Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
    ) -> list[int]:
        """Token ids of the prompt that one conversation becomes. Raises `InvalidArgumentError`."""
        (one,) = conversations_of(messages)
        return self._backend.chat_token_ids(
            Chat(
                messages=one,
                tools=tools_of(tools),
                template_options=chat_template_kwargs,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template or "",
            )
        )

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        use_tqdm: bool = True,
        *,
        pooling: str = "last",
        dimensions: int = 0,
        normalize: bool = True,
    ) -> list[EmbeddingRequestOutput]:
        """A vector for each prompt, of the last token's hidden state (`last`) or of the mean of all (`mean`).
        `dimensions` 0: all."""
        given = prompts_of(prompts)
        outputs: list[EmbeddingRequestOutput | None] = [None] * len(given)
        vectors = self._backend.vectors(given, pooling=pooling, dimensions=dimensions, normalize=normalize)
        with closing(vectors), _progress(len(given), shown=use_tqdm) as bar:
            for vector in vectors:
                outputs[vector.index] = EmbeddingRequestOutput(
                    request_id=str(vector.index),
                    prompt_token_ids=vector.prompt_token_ids,
                    outputs=Embedding(vector.values),
                )
                bar.update()
        return [output for output in outputs if output is not None]

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, use_tqdm: bool = True
    ) -> list[BeamSearchOutput]:
        """The likeliest sequences for each prompt, best first: those of transformers' search with as many beams."""
        given = prompts_of(prompts)
        outputs: list[BeamSearchOutput] = [BeamSearchOutput([])] * len(given)
        found = self._backend.beams(given, params)
        with closing(found), _progress(len(given), shown=use_tqdm) as bar:
            for one in found:
                outputs[one.index] = BeamSearchOutput(
                    [self._sequence(one.prompt_token_ids, beam) for beam in one.beams]
                )
                bar.update()
        return outputs

    def _sequence(self, prompt_token_ids: list[int], beam: Beam) -> BeamSearchSequence:
        tokens = [*prompt_token_ids, *beam.token_ids]
        return BeamSearchSequence(
            tokens=tokens,
            cum_logprob=beam.logprob,
            text=self._backend.text(tokens),
            finish_reason=str(beam.finish_reason),
        )

    def _answers(
        self,
        prompts: Sequence[str | list[int] | Chat],
        name: str,
        params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Sequence[int] | None,
        slo: LatencyTargets | Sequence[LatencyTargets | None] | None,
        slo_class: str,
        *,
        show_progress: bool,
    ) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(prompts)
        if slo is None or isinstance(slo, LatencyTargets):
            slo = [slo] * len(prompts)
        for targets in slo:
            if targets is not None:
                check_targets(targets)
        asks = [
            Ask(
                name=f"{name}[{index}]" if len(prompts) > 1 else name,
                prompt=prompt,
                params=one,
                priority=order,
                slo=targets,
                slo_class=slo_class,
            )
            for index, (prompt, one, order, targets) in enumerate(
                zip(
                    prompts,
                    _one_each(params, len(prompts), "sampling_params"),
                    _one_each(priority or [0] * len(prompts), len(prompts), "priority"),
                    _one_each(slo, len(prompts), "slo"),
                    strict=True,
                )
            )
        ]
        found: list[list[Answer]] = [[] for _ in asks]
        answers = self._backend.answers(asks)
        with closing(answers), _progress(len(asks), shown=show_progress) as bar:
            for answer in answers:
                found[answer.index].append(answer)
                if len(found[answer.index]) == asks[answer.index].params.num_candidates:
                    bar.update()
        return [self._output(ask, given) for ask, given in zip(asks, found, strict=True)]

    def _output(self, ask: Ask, answers: list[Answer]) -> RequestOutput:
        answers.sort(key=lambda answer: answer.candidate)
        first = answers[0]
        kept = answers
        if ask.params.num_candidates > ask.params.n:
            kept = sorted(answers, key=_logprob_per_token, reverse=True)[: ask.params.n]
        scores = first.result.prompt_logprobs
        return RequestOutput(
            request_id=first.result.request_id,
            prompt=ask.prompt if isinstance(ask.prompt, str) else None,
            prompt_token_ids=first.prompt_token_ids,
            prompt_logprobs=None if not scores else [None, *map(self._logprobs, scores)],
            outputs=[self._completion(ask, index, answer) for index, answer in enumerate(kept)],
            num_cached_tokens=first.result.usage.cached_tokens,
        )

    def _completion(self, ask: Ask, index: int, answer: Answer) -> CompletionOutput:
        result = answer.result
        is_shown = ask.params.wants_logprobs
        return CompletionOutput(
            index=index,
            text=result.text,
            token_ids=list(result.token_ids),
            cumulative_logprob=_logprob(answer) if is_shown else None,
            logprobs=[self._logprobs(token) for token in result.logprobs] if is_shown else None,
            finish_reason=str(result.finish_reason),
            stop_reason=_stop_reason(ask.params, result.stop_reason),
            reasoning=result.reasoning,
            tool_calls=result.tool_calls,
        )

    def _logprobs(self, token: SampledToken) -> Logprobs:
        text_of = self._backend.token_text
        top = {
            one.token_id: Logprob(one.logprob, rank, text_of(one.token_id))
            for rank, one in enumerate(token.top_logprobs, 1)
        }
        if token.token_id not in top and token.logprob is not None:
            top[token.token_id] = Logprob(token.logprob, None, text_of(token.token_id))
        return top


class _Closed:
    """Stands in the place of a backend that was closed: every use of it raises."""

    def __getattr__(self, name: str) -> Any:
        raise UnavailableError("this LLM is closed")


def _one_each(values: Sequence[ValueT], num_prompts: int, name: str) -> Sequence[ValueT]:
    if len(values) != num_prompts:
        raise InvalidArgumentError(name, f"must be one for each of {num_prompts} prompts, not {len(values)}")
    return values


def _logprob(answer: Answer) -> float:
    return sum(token.logprob or 0.0 for token in answer.result.logprobs)


def _logprob_per_token(answer: Answer) -> float:
    return _logprob(answer) / max(len(answer.result.token_ids), 1)


def _stop_reason(params: SamplingParams, reason: str) -> int | str | None:
    """Token ids are numbers again: `Result` has text."""
    if not reason:
        return None
    if reason not in params.options.get("stop", ()) and reason.isdecimal():
        return int(reason)
    return reason


def _progress(total: int, *, shown: bool) -> Any:
    return tqdm(total=total, desc="prompts", unit="prompt", disable=not shown, dynamic_ncols=True)
