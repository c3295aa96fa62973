"""A child process that parses and compiles grammars of clients before anybody else does.

The parser is native code, and reads text that clients wrote: it can overflow its stack, or compute for hours. What
comes back has passed: compiling it once more elsewhere, on a stack that is larger, takes no more than it took here.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from functools import cache
from typing import TypeVar

from common.bounded_process import MAX_ANSWER_S, BoundedProcess, ChildWords, JobDiedError, Limits, stack_of
from common.errors import InternalError
from common.fair_threads import FairThreads
from common.guided import Guided

ResultT = TypeVar("ResultT")

LIMITS = Limits(
    cpu_s=2.0,  # a usual grammar takes milliseconds
    num_bytes=128 * 2**20,
    stack_bytes=2 * 2**20,
)
LARGER_STACK_BYTES = 16 * 2**20  # of threads that compile what has passed

_CHILD = "common.grammar_child"
_WORDS = ChildWords(
    subjects="grammars",
    work="compile",
    waiting="grammars of others are being compiled",
    broken="it is nested too deeply, refers too often from one part to the next, or has numbers beyond 64 bits",
)


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


class GrammarProcess(BoundedProcess):
    """Checks grammars in a child."""

    def __init__(self, tokens: ModelTokens | None = None) -> None:
        """Without `tokens`, grammars are made of bytes: what depends on a model's tokens is not checked."""
        super().__init__(_CHILD, [] if tokens is None else [json.dumps(asdict(tokens))], LIMITS, _WORDS)

    def check(self, guided: Guided, wait_s: float = MAX_ANSWER_S) -> Checked:
        """Raises `ValueError` with a reason for the client, and `UnavailableError` if the others' grammars took all of
        `wait_s` or the child got no time to answer."""
        (kind,) = guided.kinds
        try:
            answer = self.ask({kind: getattr(guided, kind)}, wait_s)
        except JobDiedError as error:
            raise ValueError(f"{kind} cannot be used: {error}") from None
        match answer:
            case {"grammar": str(grammar), "bytes": int(num_bytes)}:
                return Checked(grammar, num_bytes)
            case {"wrong": str(reason)}:
                raise ValueError(reason)
        raise InternalError("the answer about a grammar is not understood")


@cache
def shared_process(tokens: ModelTokens | None = None) -> GrammarProcess:
    """The one of this process."""
    process = GrammarProcess(tokens)
    atexit.register(process.close)
    return process


class GrammarThreads(FairThreads):
    """A pool of threads whose stacks are larger than the child's."""

    def submit(self, owner: str, call: Callable[[], ResultT]) -> Future[ResultT]:
        with stack_of(LARGER_STACK_BYTES):
            return super().submit(owner, call)
