"""A request on one worker, in numbers."""

from __future__ import annotations

from enum import Enum, auto

import msgspec


class Mode(Enum):
    """What is asked of the worker, as `engine.messages.RequestMode`."""

    LOCAL = auto()
    REMOTE = auto()
    PREFILL = auto()


class Job(msgspec.Struct, eq=False):
    """Counts are tokens, unless said otherwise."""

    key: str
    mode: Mode
    num_prompt: int
    num_output: int
    names: list[bytes]  # of the full blocks of its prompt, then of its answer
    chain: bytes  # of its answer (`block_names`)
    min_remote: int = 0  # missing tokens for which a prefill worker is asked; 0: one block
    num_asked: int = 0  # of the prompt, that a prefill worker may be asked for; less than all: the prompt is split
    first_block: int = 0  # of a prefill: the first one that its decode worker lacks
    num_lendable: int = 0  # leading blocks that the decode worker can lend
    is_part: bool = False  # a prefill that gives no token
    num_computed: int = 0
    num_drawn: int = 0  # of the answer; while it decodes, only once it stops
    num_cached: int = 0  # of the prompt, that were there when it was admitted
    num_published: int = 0  # blocks
    num_preemptions: int = 0
    num_blocks: int = 0  # that it owns
    held: list[bytes] = []  # names of those of them that have one
    num_named: int = 0  # leading blocks whose names were given
    rank: int = 0  # in the order of admission
    base: int = 0  # context less the steps that the worker has made, while it decodes
    is_new: bool = True  # never admitted
    ask_from: int = 0  # while it is parked: the block from which on its KV was asked for; earlier ones are known
    num_followed: int = 0  # jobs whose fetches it waits for
    num_arrived: int | None = None  # leading blocks, with those of the jobs that it follows; None: its own do not yet

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_drawn

    @property
    def num_queued(self) -> int:
        """Tokens of its prompt that are to be computed."""
        num = self.num_prompt - self.num_computed
        return num if num > 0 else 0
