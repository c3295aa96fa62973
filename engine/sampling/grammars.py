"""Grammars of guided requests: compiled on threads of their own, and kept for the next request with the same grammar.

A request waits here as WAITING_FOR_GRAMMAR, before it waits for anything else. What a grammar may cost is bounded: its
size (`common.guided`), time, memory and stack of compiling it (`common.grammar_process`: in a process of its own, which
ends if they are used up), the compiler's work (llguidance's limits: fuel, states, items), the time a request waits
(`COMPILE_TIMEOUT_S`), how many wait, and how many are kept (`GrammarBounds`). Tenants take turns by the time that their
grammars take (`common.fair_threads`).
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

from llguidance import LLMatcher, LLTokenizer

from common import metrics
from common.errors import BatonError, InternalError, InvalidArgumentError, OverloadedError, UnavailableError
from common.fair_threads import FullError
from common.grammar_process import GrammarThreads, ModelTokens, shared_process
from common.grammar_trial import read_tokenizer
from common.guided import Guided, grammar_error, parser_limits
from engine.request import Request, RequestStatus
from engine.sampling.guide import Guide

log = logging.getLogger(__name__)

COMPILE_TIMEOUT_S = 10.0


@dataclass(slots=True, frozen=True, kw_only=True)
class GrammarBounds:
    num_threads: int = 1  # the process that checks them does one after the other, so further threads would only wait
    max_pending: int = 64  # grammars that are compiled or wait for it
    max_kept: int = 256
    max_kept_chars: int = 8 * 2**20  # of all grammars that are kept; what they take is some times that
    max_kept_bytes: int = 256 * 2**20  # that all kept grammars took when they were compiled, about


class Compiler(Protocol):
    def __call__(self, guided: Guided) -> Guide:
        """A guide at the beginning. Raises `ValueError` with a reason, for the client, and `BatonError` if it is not to
        blame. Called on several threads."""
        ...


class GrammarCompiler:
    """Compiles grammars for one model's tokenizer, which is read by `load`, or when the first grammar comes."""

    def __init__(self, tokenizer_file: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer_file = tokenizer_file
        self._tokens = ModelTokens(str(tokenizer_file), vocab_size, tuple(eos_token_ids))
        self._eos_token_ids = list(eos_token_ids)
        self._lock = threading.Lock()
        self._tokenizer: LLTokenizer | None = None
        self._failure = ""  # why it cannot be read; it is not tried again

    def __call__(self, guided: Guided) -> Guide:
        tokenizer = self._loaded()
        checked = shared_process(self._tokens).check(guided, COMPILE_TIMEOUT_S)
        matcher = LLMatcher(tokenizer, checked.grammar, log_level=0, limits=parser_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # a grammar that no text matches fails here
        if matcher.is_error():
            raise ValueError(grammar_error(guided, matcher.get_error()))
        return Guide(matcher, tokenizer, num_bytes=checked.num_bytes)

    def start(self) -> None:
        """Starts the process that checks grammars, so that the first one does not wait for it; not for a model without
        guided text."""
        if self._tokenizer is not None:
            shared_process(self._tokens).start()

    def load(self) -> None:
        """Reads the tokenizer, which takes a fifth of a second for each 50,000 tokens, and holds the interpreter lock
        meanwhile. Raises `ValueError` if guided text cannot be had from this model; so will every guided request."""
        self._loaded()

    def _loaded(self) -> LLTokenizer:
        with self._lock:
            if self._failure:
                raise ValueError(self._failure)
            if self._tokenizer is None:
                # This model cannot generate guided text: without an end token no grammar can end. Guided requests fail
                # as with a bad grammar.
                if not self._eos_token_ids:
                    raise ValueError("cannot be used: this model names no token that ends an answer")
                if not self._tokenizer_file.is_file():
                    raise ValueError(f"cannot be used: this model has no {self._tokenizer_file.name}")
                try:
                    self._tokenizer = read_tokenizer(self._tokens)
                except ValueError as error:
                    self._failure = str(error)
                    raise
            return self._tokenizer


@dataclass(slots=True)
class _Pending:
    since: float
    requests: dict[str, Request]  # by id
    compiled: Future[Guide] = field(default_factory=Future)


@dataclass(slots=True, frozen=True)
class Answered:
    """A request that waits for its grammar no more: it has a guide, or failed."""

    request: Request
    failure: str = ""  # why there is no guide
    grpc_code: str = InvalidArgumentError.grpc_code  # of the failure


class PendingGrammars:
    """Requests whose grammars are being compiled. Only the engine's thread may call it."""

    def __init__(
        self,
        compiler: Compiler,
        clock: Callable[[], float],
        wake: Callable[[], None],
        bounds: GrammarBounds | None = None,
    ) -> None:
        """`wake` is called on any thread when a grammar is done."""
        self._bounds = bounds or GrammarBounds()
        self._compiler = compiler
        self._clock = clock
        self._wake = wake
        self._pool: GrammarThreads | None = None
        self._pending: dict[tuple[str, Guided], _Pending] = {}  # by tenant: a grammar waits in the turn of each
        self._kept: OrderedDict[Guided, Guide | str] = OrderedDict()  # or why it is of no use; last used last
        self._num_kept_chars = 0
        self._num_kept_bytes = 0
        self._answered: list[Answered] = []

    def __len__(self) -> int:
        return sum(len(pending.requests) for pending in self._pending.values())

    @property
    def has_pending(self) -> bool:
        """Whether a grammar is compiled, for requests that may have ended meanwhile, or an answer is to be taken."""
        return bool(self._pending or self._answered)

    @property
    def num_prompt_tokens(self) -> int:
        waiting = (request for pending in self._pending.values() for request in pending.requests.values())
        return sum(request.num_prompt_tokens for request in waiting)

    def start(self, request: Request, guided: Guided) -> None:
        """Begins to compile the request's grammar. `take_answered` returns the request once that is done."""
        request.status = RequestStatus.WAITING_FOR_GRAMMAR
        if (known := self._kept.get(guided)) is not None:
            self._kept.move_to_end(guided)
            metrics.worker_grammars.labels("cached").inc()
            self._answer(request, known)
        elif (pending := self._find(request.tenant, guided)) is not None:
            pending.requests[request.request_id] = request
            metrics.worker_grammars.labels("cached").inc()
        else:
            pending = _Pending(self._clock(), {request.request_id: request})
            try:
                pending.compiled = self._threads().submit(request.tenant, partial(self._compiler, guided))
            except FullError as error:
                self._refuse_all(pending, error)
                return
            self._pending[request.tenant, guided] = pending
            pending.compiled.add_done_callback(lambda _: self._wake())

    def _find(self, tenant: str, guided: Guided) -> _Pending | None:
        """A grammar that is being compiled, for whichever tenant; one that waits, in the tenant's own turn."""
        if (own := self._pending.get((tenant, guided))) is not None:
            return own
        others = (pending for (_, one), pending in self._pending.items() if one == guided)
        return next((pending for pending in others if pending.compiled.running()), None)

    def _threads(self) -> GrammarThreads:
        if self._pool is None:
            self._pool = GrammarThreads(
                self._bounds.num_threads,
                "grammar",
                max_pending=self._bounds.max_pending,
                full="too many grammars are being compiled",
            )
        return self._pool

    def drop(self, request_id: str) -> None:
        """The request has ended. If its grammar is being compiled, it still is to its end, for later requests."""
        for key, pending in list(self._pending.items()):
            if pending.requests.pop(request_id, None) is not None:
                self._forget_unwanted(key, pending)
        self._answered = [one for one in self._answered if one.request.request_id != request_id]

    def take_answered(self) -> list[Answered]:
        """Requests whose wait has ended since the last call."""
        now = self._clock()
        for key, pending in list(self._pending.items()):
            if pending.compiled.done():
                if self._pending.pop(key, None) is not None:  # or else it was compiled for another tenant just now
                    self._take_in(key[1], pending)
            elif now > pending.since + COMPILE_TIMEOUT_S:
                # Compiling has bounds of its own, which are narrower: these requests waited for others' grammars.
                self._fail_all(pending, OverloadedError("others' grammars are being compiled, try again later"))
                metrics.worker_grammars.labels("late").inc(len(pending.requests))
                pending.requests.clear()
                self._forget_unwanted(key, pending)
        answered, self._answered = self._answered, []
        return answered

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def _take_in(self, guided: Guided, pending: _Pending) -> None:
        error = pending.compiled.exception()
        if isinstance(error, FullError):
            self._refuse_all(pending, error)
            return
        if isinstance(error, OverloadedError | UnavailableError):
            self._fail_all(pending, error)
            metrics.worker_grammars.labels("late").inc(len(pending.requests))
            return
        if error is not None and not isinstance(error, ValueError):
            log.error("a grammar was not compiled", exc_info=error)
            metrics.worker_grammars.labels("failed").inc()
            self._fail_all(pending, InternalError(f"its grammar was not compiled: {type(error).__name__}: {error}"))
            return
        metrics.worker_grammars.labels("compiled" if error is None else "wrong").inc()
        metrics.worker_grammar_seconds.inc(self._clock() - pending.since)
        result = pending.compiled.result() if error is None else str(error)
        self._keep(guided, result)
        for request in pending.requests.values():
            self._answer(request, result)
        for key, other in list(self._pending.items()):
            if key[1] == guided and other.compiled.cancel():  # it waits in another tenant's turn
                del self._pending[key]
                metrics.worker_grammars.labels("cached").inc(len(other.requests))
                for request in other.requests.values():
                    self._answer(request, result)

    def _refuse_all(self, pending: _Pending, error: FullError) -> None:
        metrics.worker_grammars.labels("full").inc(len(pending.requests))
        self._fail_all(pending, error)

    def _fail_all(self, pending: _Pending, error: BatonError) -> None:
        self._answered += [Answered(request, error.reason, error.grpc_code) for request in pending.requests.values()]

    def _forget_unwanted(self, key: tuple[str, Guided], pending: _Pending) -> None:
        """Drops a grammar that no request waits for, unless its compilation has begun."""
        if not pending.requests and pending.compiled.cancel():
            del self._pending[key]

    def _answer(self, request: Request, result: Guide | str) -> None:
        if isinstance(result, str):
            self._answered.append(Answered(request, result))
            return
        request.status = RequestStatus.WAITING
        request.guide = result.fork()
        self._answered.append(Answered(request))

    def _keep(self, guided: Guided, result: Guide | str) -> None:
        self._kept[guided] = result
        self._num_kept_chars += num_chars(guided)
        self._num_kept_bytes += _num_bytes(result)
        bounds = self._bounds
        while (
            len(self._kept) > bounds.max_kept
            or self._num_kept_chars > bounds.max_kept_chars
            or self._num_kept_bytes > bounds.max_kept_bytes
        ):
            oldest, dropped = self._kept.popitem(last=False)
            self._num_kept_chars -= num_chars(oldest)
            self._num_kept_bytes -= _num_bytes(dropped)


def num_chars(guided: Guided) -> int:
    texts = (guided.json_schema, guided.regex, guided.grammar, guided.structural_tag, *guided.choice)
    return sum(map(len, texts))


def _num_bytes(kept: Guide | str) -> int:
    return 0 if isinstance(kept, str) else kept.num_bytes
