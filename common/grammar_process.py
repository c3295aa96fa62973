"""A child process that parses and compiles grammars of clients before anybody else does.

The parser is native code, and reads text that clients wrote: it can overflow its stack, or compute for hours. Here that
ends a process of its own, which nobody else uses. What comes back has passed: compiling it once more elsewhere, on a
stack that is larger, takes no more than it took here.

    this process ── jobs, answers ──┬─ keeper: has read the libraries and the tokenizer; forks a runner, and another one
                                    │          if that dies (a millisecond), and says what it died of
                                    └─ runner: does the jobs, each within MAX_CPU_S, MAX_BYTES and STACK_BYTES

Both end when this process does, however it ends: the pipe of the jobs closes. They have no other file or socket.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from typing import IO, TypeVar

from common.errors import InternalError, UnavailableError
from common.guided import Guided

ResultT = TypeVar("ResultT")

MAX_CPU_S = 2.0  # of one grammar; a usual one takes milliseconds
MAX_BYTES = 128 * 2**20  # that one grammar may take beyond what the child has without it
STACK_BYTES = 2 * 2**20  # of the thread that parses and compiles in the child
LARGER_STACK_BYTES = 16 * 2**20  # of threads that compile what has passed
MAX_ANSWER_S = 20.0  # on the clock: then the child is stuck or gets no processor

_CHILD = "common.grammar_child"
# Signals of a parser that broke on what it read, and of the limits. Any other end is not the grammar's fault.
_BLAMED = (signal.SIGPROF, signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGTRAP, signal.SIGFPE)

log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class ModelTokens:
    """Whose tokens grammars are made of."""

    file: str  # tokenizer.json
    vocab_size: int
    eos_token_ids: tuple[int, ...]


@dataclass(slots=True, frozen=True)
class Checked:
    """A grammar that has passed."""

    grammar: str  # for llguidance
    num_bytes: int  # that it took when compiled, about


class GrammarProcess:
    """Checks grammars in a child, which starts when the first one comes or with `start`. Any thread may use it:
    grammars are checked one after the other."""

    def __init__(self, tokens: ModelTokens | None = None) -> None:
        """Without `tokens`, grammars are made of bytes: what depends on a model's tokens is not checked."""
        self._tokens = tokens
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._answers = b""  # bytes that came and are no whole line yet

    @property
    def pid(self) -> int | None:
        """Of the keeper; None if none runs."""
        return None if self._child is None else self._child.pid

    def start(self) -> None:
        """Starts the child, unless it runs, and does not wait until it is ready."""
        with self._lock:
            self._started()

    def check(self, guided: Guided, wait_s: float = MAX_ANSWER_S) -> Checked:
        """Raises `ValueError` with a reason for the client, and `UnavailableError` if the others' grammars took all of
        `wait_s` or the child got no time to answer."""
        if not self._lock.acquire(timeout=wait_s):
            raise UnavailableError("grammars of others are being compiled")
        try:
            return self._check(guided)
        finally:
            self._lock.release()

    def close(self) -> None:
        with self._lock:
            self._end()

    def _check(self, guided: Guided) -> Checked:
        (kind,) = guided.kinds
        child = self._started()
        job = json.dumps({kind: getattr(guided, kind)}).encode() + b"\n"
        for is_last in (False, True):
            try:
                _stdin(child).write(job)
                _stdin(child).flush()
                answer = self._answer(child)
            except OSError as error:  # somebody ended it since the last grammar
                self._end()
                if is_last:
                    raise UnavailableError("the process that checks grammars ended") from error
                child = self._started()
            else:
                break
        match answer:
            case {"grammar": str(grammar), "bytes": int(num_bytes)}:
                return Checked(grammar, num_bytes)
            case {"wrong": str(reason)}:
                raise ValueError(reason)
            case {"died": int(code)}:
                log.warning("the process that checks grammars ended", extra={"kind": kind, "code": code})
                if -code not in _BLAMED:
                    raise UnavailableError("the process that checks grammars ended")
                raise ValueError(f"{kind} cannot be used: {_why_died(code)}")
        raise InternalError(f"a grammar was not checked: {answer.get('failed')}")

    def _started(self) -> subprocess.Popen[bytes]:
        if self._child is not None and self._child.poll() is None:
            return self._child
        self._end()
        tokens = [] if self._tokens is None else [json.dumps(asdict(self._tokens))]
        self._child = subprocess.Popen(  # noqa: S603 - our own command
            [sys.executable, "-m", _CHILD, *tokens], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        return self._child

    def _answer(self, child: subprocess.Popen[bytes]) -> dict[str, object]:
        """The next one. Raises `OSError` if the child ended, and `UnavailableError` if it does not answer."""
        give_up = time.monotonic() + MAX_ANSWER_S
        output = child.stdout
        if output is None:
            raise InternalError("the child was started without this pipe")
        while True:
            line, is_whole, rest = self._answers.partition(b"\n")
            if is_whole:
                self._answers = rest
                with contextlib.suppress(ValueError):  # what a runner wrote before it died
                    return dict(json.loads(line))
                continue
            ready, _, _ = select.select([output], [], [], max(0.0, give_up - time.monotonic()))
            if not ready:
                self._end()
                raise UnavailableError("this machine has no time for grammars")
            if not (read := os.read(output.fileno(), 2**16)):
                raise BrokenPipeError("the child ended")
            self._answers += read

    def _end(self) -> None:
        child, self._child, self._answers = self._child, None, b""
        if child is None:
            return
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()  # the runner ends, too
        child.kill()
        child.wait()


@cache
def shared_process(tokens: ModelTokens | None = None) -> GrammarProcess:
    """The one of this process."""
    process = GrammarProcess(tokens)
    atexit.register(process.close)
    return process


class GrammarThreads:
    """A pool of threads whose stacks are larger than the child's."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    def submit(self, work: Callable[[], ResultT]) -> Future[ResultT]:
        with stack_of(LARGER_STACK_BYTES):
            return self._pool.submit(work)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


_STACK_LOCK = threading.Lock()


@contextlib.contextmanager
def stack_of(num_bytes: int) -> Iterator[None]:
    """Threads that start inside have this stack."""
    with _STACK_LOCK:
        before = threading.stack_size(num_bytes)
        try:
            yield
        finally:
            threading.stack_size(before)


def _stdin(child: subprocess.Popen[bytes]) -> IO[bytes]:
    if child.stdin is None:
        raise InternalError("the child was started without this pipe")
    return child.stdin


def _why_died(code: int) -> str:
    """`code` as of `os.waitstatus_to_exitcode`."""
    if code == -signal.SIGPROF:
        return f"it costs more than {MAX_CPU_S:g} s to compile"
    if code == -signal.SIGABRT:
        return f"it costs more than {MAX_BYTES // 2**20} MiB to compile"
    return "it is nested too deeply, refers too often from one part to the next, or has numbers beyond 64 bits"
