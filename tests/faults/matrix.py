"""What happens to a request when something goes wrong: each process, at each moment, by each fault.

This table is what the tests of this folder check, and what docs/faults.md is written from
(`python -m tools.faults_page --write`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, StrEnum


class Process(StrEnum):
    CLIENT = "client"
    ROUTER = "router"
    PREFILL_FRONT = "prefill front"
    PREFILL_ENGINE = "prefill engine"
    PREFILL_RANK = "prefill rank"  # beside the engine, which is rank 0
    DECODE_FRONT = "decode front"
    DECODE_ENGINE = "decode engine"
    DECODE_RANK = "decode rank"
    STORE = "store"


RANKS = frozenset({Process.PREFILL_RANK, Process.DECODE_RANK})


class Moment(StrEnum):
    QUEUED = "queued"
    MID_CHUNK = "in mid-chunk"
    BETWEEN_CHUNKS = "between chunks"
    MID_TRANSFER = "in mid-transfer"
    AFTER_FIRST_TOKEN = "after the first token"
    MID_DECODE = "in mid-decode"


MOMENTS = {
    Moment.QUEUED: "a decode worker has blocks for the prompt, and the prefill worker's engine has not begun",
    Moment.MID_CHUNK: "the prefill worker computes the prompt's first chunk",
    Moment.BETWEEN_CHUNKS: "the prefill worker has computed one chunk or more, and others are still to come",
    Moment.MID_TRANSFER: "blocks are announced that have not arrived, and others are still to be computed",
    Moment.AFTER_FIRST_TOKEN: "the client has one token, and the prompt's blocks have not arrived",
    Moment.MID_DECODE: "the client has several tokens, and more are to come",
}


class Fault(StrEnum):
    CANCEL = "cancel"
    DEADLINE = "deadline"
    SIGKILL = "SIGKILL"
    SIGSTOP = "SIGSTOP"
    CUT = "cut"
    FULL_DISK = "full disk"
    CORRUPT_FILE = "corrupt file"


FAULTS = {
    Fault.CANCEL: "the client cancels its call, or closes its connection",
    Fault.DEADLINE: "the request's deadline passes",
    Fault.SIGKILL: "the process is killed (a worker's other process ends with it)",
    Fault.SIGSTOP: "the process hangs: its connections stay, nothing answers on them",
    Fault.CUT: "the link of the process's host goes down; nobody is told",
    Fault.FULL_DISK: "the store's file system has no byte left",
    Fault.CORRUPT_FILE: "files in the store change a byte, lose their end, or lose everything",
}


class End(Enum):
    """What the client gets."""

    SAME_ANSWER = "same answer"
    CANCELLED = "nothing more"
    DEADLINE = "DEADLINE_EXCEEDED"
    LOST_WITH_ROUTER = "UNAVAILABLE"
    NOT_POSSIBLE = "-"


class Counted(StrEnum):
    """What must have been counted, where a user and an operator can see it."""

    RETRY = "retry"  # another decode worker, before the first token
    PREFILL_RETRY = "prefill retry"  # another prefill worker
    FALLBACK = "fallback"  # the decode worker computed KV itself
    MIGRATION = "migration"  # another decode worker, after the first token
    LOST_BLOCKS = "blocks lost"  # fetches that failed
    CANCELLED = "cancelled"
    DEADLINE = "deadline"


@dataclass(slots=True, frozen=True)
class Outcome:
    end: End
    counted: frozenset[Counted] = frozenset()
    may_count: frozenset[Counted] = frozenset()  # what depends on what was quicker
    why: str = ""  # NOT_POSSIBLE: the reason

    def words(self) -> str:
        if self.end is End.NOT_POSSIBLE:
            return "-"
        counted = [item.value for item in Counted if item in self.counted]
        maybe = [f"{item.value}?" for item in Counted if item in self.may_count]
        return f"{self.end.value}" + (f" ({', '.join(counted + maybe)})" if counted or maybe else "")


def same(*counted: Counted, may: tuple[Counted, ...] = ()) -> Outcome:
    return Outcome(End.SAME_ANSWER, frozenset(counted), frozenset(may))


def not_possible(why: str) -> Outcome:
    return Outcome(End.NOT_POSSIBLE, why=why)


Row = dict[Moment, Outcome]


def row(
    queued: Outcome,
    mid_chunk: Outcome,
    between_chunks: Outcome,
    mid_transfer: Outcome,
    after_first_token: Outcome,
    mid_decode: Outcome,
) -> Row:
    outcomes = (queued, mid_chunk, between_chunks, mid_transfer, after_first_token, mid_decode)
    return dict(zip(Moment, outcomes, strict=True))


def always(outcome: Outcome) -> Row:
    return dict.fromkeys(Moment, outcome)


UNTOUCHED = same()
CANCELLED = Outcome(End.CANCELLED, frozenset({Counted.CANCELLED}))
DEADLINE = Outcome(End.DEADLINE, frozenset({Counted.DEADLINE}))
LOST = Outcome(End.LOST_WITH_ROUTER)
# A router that is cut off loses sight of its workers, looks for others for a while, and then of its client.
LOST_WITH_CUT = Outcome(
    End.LOST_WITH_ROUTER, may_count=frozenset({Counted.RETRY, Counted.MIGRATION, Counted.CANCELLED})
)
RETRY = same(Counted.RETRY)
MIGRATION = same(Counted.MIGRATION)
MOVED = same(may=(Counted.RETRY, Counted.MIGRATION))  # as the first token lay unread in the router's socket, or not
PREFILL_RETRY = same(Counted.PREFILL_RETRY)
FALLBACK = same(Counted.FALLBACK)
LOST_BLOCKS = same(Counted.LOST_BLOCKS, Counted.FALLBACK)

# Blocks that a dead prefill worker announced: a store still has them. What had been asked of its memory fails, maybe
# after another prefill worker has announced them again, and is then computed by the decode worker.
PREFILL_RETRY_P2P = same(Counted.PREFILL_RETRY, may=(Counted.FALLBACK, Counted.LOST_BLOCKS))
# A stream that fails is counted, even if it is too late for another worker. Whether it or a read fails first varies.
_STREAM_OR_READ = (Counted.PREFILL_RETRY, Counted.LOST_BLOCKS)
FALLBACK_P2P = same(Counted.FALLBACK, may=_STREAM_OR_READ)
READ_ALL_THE_SAME = same(may=(Counted.FALLBACK, *_STREAM_OR_READ))  # an engine is read from while its front hangs
ANNOUNCED = same(may=(Counted.FALLBACK,))  # the last announcement is later than the first token

# The engine may have read all that the store holds, and have let the worker go, before its stream is seen to break.
READ_OR_BROKEN = same(may=(Counted.PREFILL_RETRY, Counted.FALLBACK))
PREFILL_LOST = row(PREFILL_RETRY, PREFILL_RETRY, PREFILL_RETRY, PREFILL_RETRY, READ_OR_BROKEN, UNTOUCHED)
PREFILL_LOST_P2P = row(PREFILL_RETRY, PREFILL_RETRY, PREFILL_RETRY_P2P, PREFILL_RETRY_P2P, FALLBACK_P2P, UNTOUCHED)
DECODE_LOST = row(RETRY, RETRY, RETRY, RETRY, MIGRATION, MIGRATION)

# The front passes the first token on, should that come before it knows that its engine is gone, or gives it up.
DECODE_ENGINE_LOST = row(MOVED, MOVED, MOVED, MOVED, MIGRATION, MIGRATION)

# A decode worker that is cut off, or goes on, notices that its prefill worker has gone, and counts that before it ends
# the request.
_LATE = (Counted.PREFILL_RETRY, Counted.LOST_BLOCKS)
RETRY_LATE, MIGRATION_LATE = same(Counted.RETRY, may=_LATE), same(Counted.MIGRATION, may=_LATE)
DECODE_MISSED = row(RETRY_LATE, RETRY_LATE, RETRY_LATE, RETRY_LATE, MIGRATION_LATE, MIGRATION)

ONLY_CLIENTS = not_possible(
    "only a client cancels or sets a deadline; it reaches this process through the client's row"
)
NO_FILES = not_possible("holds no files: the store does")
ONE_LINK = not_possible("has no link of its own: the worker's is the row of its front")
NO_PROCESS = not_possible("shared_storage is a directory, and no process")
NO_STORE = not_possible("nixl has no store")
IN_MEMORY = not_possible("lmcache keeps blocks in memory here")
ONE_HOST = not_possible("an LMCache server and its workers share one host's memory")
NO_FILE_YET = not_possible("the request has no file yet; those of an earlier request are read before it is computed")

_TABLE: dict[tuple[Process, Fault], Row] = {
    (Process.CLIENT, Fault.CANCEL): always(CANCELLED),
    (Process.CLIENT, Fault.DEADLINE): always(DEADLINE),
    (Process.CLIENT, Fault.SIGKILL): always(CANCELLED),
    (Process.CLIENT, Fault.SIGSTOP): always(CANCELLED),
    (Process.CLIENT, Fault.CUT): always(CANCELLED),
    (Process.ROUTER, Fault.SIGKILL): always(LOST),
    (Process.ROUTER, Fault.SIGSTOP): always(MOVED),
    (Process.ROUTER, Fault.CUT): always(LOST_WITH_CUT),
    **{(Process.PREFILL_FRONT, fault): PREFILL_LOST for fault in (Fault.SIGKILL, Fault.SIGSTOP, Fault.CUT)},
    **{(Process.PREFILL_ENGINE, fault): PREFILL_LOST for fault in (Fault.SIGKILL, Fault.SIGSTOP)},
    (Process.PREFILL_ENGINE, Fault.CUT): always(ONE_LINK),
    **{(Process.PREFILL_RANK, fault): PREFILL_LOST for fault in (Fault.SIGKILL, Fault.SIGSTOP)},
    (Process.PREFILL_RANK, Fault.CUT): always(ONE_LINK),
    (Process.DECODE_FRONT, Fault.SIGKILL): DECODE_LOST,
    **{(Process.DECODE_FRONT, fault): DECODE_MISSED for fault in (Fault.SIGSTOP, Fault.CUT)},
    (Process.DECODE_ENGINE, Fault.SIGKILL): DECODE_ENGINE_LOST,
    (Process.DECODE_ENGINE, Fault.SIGSTOP): DECODE_ENGINE_LOST,
    (Process.DECODE_ENGINE, Fault.CUT): always(ONE_LINK),
    (Process.DECODE_RANK, Fault.SIGKILL): DECODE_ENGINE_LOST,
    (Process.DECODE_RANK, Fault.SIGSTOP): DECODE_ENGINE_LOST,
    (Process.DECODE_RANK, Fault.CUT): always(ONE_LINK),
    **{(Process.STORE, fault): always(NO_PROCESS) for fault in (Fault.SIGKILL, Fault.SIGSTOP, Fault.CUT)},
    (Process.STORE, Fault.FULL_DISK): row(FALLBACK, FALLBACK, FALLBACK, FALLBACK, ANNOUNCED, UNTOUCHED),
    # A prefill worker that computes what a bad file is named after announces that file, which its writer found there.
    (Process.STORE, Fault.CORRUPT_FILE): row(
        same(Counted.LOST_BLOCKS, may=(Counted.FALLBACK,)), NO_FILE_YET, ANNOUNCED, LOST_BLOCKS, LOST_BLOCKS, UNTOUCHED
    ),
}

# The cells in which a connector that moves blocks from memory to memory differs from a store.
_P2P: dict[tuple[Process, Fault], Row] = {
    (process, fault): PREFILL_LOST_P2P
    for process in (Process.PREFILL_FRONT, Process.PREFILL_ENGINE, Process.PREFILL_RANK)
    for fault in (Fault.SIGKILL, Fault.SIGSTOP, Fault.CUT)
    if fault is not Fault.CUT or process is Process.PREFILL_FRONT
}
_P2P[Process.PREFILL_FRONT, Fault.SIGSTOP] = {**PREFILL_LOST_P2P, Moment.AFTER_FIRST_TOKEN: READ_ALL_THE_SAME}

# A server that holds the blocks can die or hang, unlike a directory. What it held is computed by the decode worker.
_SERVER_LOST = same(Counted.FALLBACK, may=(Counted.LOST_BLOCKS,))
# A writer that dies keeps others from writing the same blocks for a while: another prefill worker may not get them in.
_WRITER_LOST = {**PREFILL_LOST, Moment.BETWEEN_CHUNKS: PREFILL_RETRY_P2P, Moment.MID_TRANSFER: PREFILL_RETRY_P2P}
_LMCACHE: dict[tuple[Process, Fault], Row] = {
    **{
        (process, fault): _WRITER_LOST
        for process in (Process.PREFILL_FRONT, Process.PREFILL_ENGINE, Process.PREFILL_RANK)
        for fault in (Fault.SIGKILL, Fault.SIGSTOP)
    },
    **{
        (Process.STORE, fault): {**always(_SERVER_LOST), Moment.MID_DECODE: UNTOUCHED}
        for fault in (Fault.SIGKILL, Fault.SIGSTOP)
    },
    **{(Process.STORE, fault): always(IN_MEMORY) for fault in (Fault.FULL_DISK, Fault.CORRUPT_FILE)},
    **{(process, Fault.CUT): always(ONE_HOST) for process in Process},
}

CONNECTORS = ("shared_storage", "nixl", "lmcache")


@dataclass(slots=True, frozen=True)
class Cell:
    process: Process
    moment: Moment
    fault: Fault

    def __str__(self) -> str:
        return "-".join(part.value.replace(" ", "_") for part in (self.process, self.fault, self.moment))


CELLS = [Cell(process, moment, fault) for process in Process for fault in Fault for moment in Moment]


def heard_all_the_same(outcome: Outcome) -> Outcome:
    """If only what a host should receive is dropped. What it sends arrives: a part that is complete before its
    silence is noticed needs nobody else."""
    if outcome.end is not End.SAME_ANSWER:
        return outcome
    return replace(outcome, counted=frozenset(), may_count=outcome.counted | outcome.may_count)


def expected(cell: Cell, connector: str) -> Outcome:
    """`connector` is one of CONNECTORS."""
    key = cell.process, cell.fault
    if connector == "nixl":
        if cell.process is Process.STORE:
            return NO_STORE
        if key in _P2P:
            return _P2P[key][cell.moment]
    if connector == "lmcache" and key in _LMCACHE:
        return _LMCACHE[key][cell.moment]
    if key in _TABLE:
        return _TABLE[key][cell.moment]
    return ONLY_CLIENTS if cell.fault in (Fault.CANCEL, Fault.DEADLINE) else NO_FILES
