"""An engine without a model: a process that speaks `engine.messages` as the real one does, and computes nothing.

A token depends on the prompt and on its position alone, so a decode worker continues what a prefill worker began, and
any worker what another one began. What is to happen to a request is said in its cache salt (`Script`), which travels to
both workers, or by the first token of its prompt (`tests.worker.words`). Each command is logged, one JSON object in a
line, in `<model_dir>/<name>.commands`.
"""

from __future__ import annotations

import heapq
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import msgspec
import zmq

from common.types import FinishReason, KVCacheSpec, SampledToken, WorkerLoad, request_tag
from engine import messages as m
from engine.process import Bootstrap
from kv_store.base import BlockRef
from tests.worker import words
from tests.worker.words import BLOCK_SIZE, VOCAB_SIZE

NUM_BLOCKS = 1000
MAX_MODEL_LEN = 200_000
ALIVE_INTERVAL_S = 0.05
SPEC = KVCacheSpec(model_id="fake", num_layers=1, num_kv_heads=1, head_dim=4, block_size=BLOCK_SIZE, dtype="float32")


class Script(msgspec.Struct, frozen=True, omit_defaults=True):
    """What happens to one request."""

    name: str = ""  # tells requests apart that are to fare alike
    token_s: float = 0.0  # between two tokens
    on_status: bool = False  # a token comes each time that the engine is asked for its status, and at no other time
    stall_at: int | None = None  # the token at this position never comes
    prefill_stalls: bool = False  # the prefill engine never computes anything
    late_blocks_s: float = 0.0  # blocks are published so long after the first token
    unpublished: tuple[int, ...] = ()  # indexes of blocks that the prefill engine cannot publish
    lost: tuple[int, ...] = ()  # indexes of blocks that the decode engine cannot fetch
    fetch_s: float = 0.0  # what a fetch takes
    prefill_fails: bool = False  # the prefill engine gives the request up
    ignores_prefill: bool = False  # what a prefill worker says counts for nothing, until none is left
    num_tokens: int | None = None  # of the answer; the request's max_tokens if None
    floods: bool = False  # 200 events of 500 tokens, at once
    num_cached: int = 0  # leading blocks that the decode engine has and the prefill engine lacks
    lends_nothing: bool = False  # the decode engine does not answer who asks for them
    is_garbage: bool = False  # the engine says what its front does not understand

    def salt(self) -> str:
        return msgspec.json.encode(self).decode()


WORDS = {
    words.ANSWER: Script(num_tokens=1),
    words.WAIT: Script(stall_at=0),
    words.FLOOD: Script(floods=True),
    words.REMOTE: Script(num_tokens=1, ignores_prefill=True),
    words.GARBAGE: Script(is_garbage=True),
}


def script_of(command: m.AddRequest) -> Script:
    if command.cache_salt.startswith("{"):
        return msgspec.json.decode(command.cache_salt, type=Script)
    return WORDS.get(command.prompt_token_ids[0], Script())


def token_at(prompt_token_ids: list[int], position: int) -> int:
    """The token at `position` of the answer."""
    return (sum(prompt_token_ids) + 7 * position) % VOCAB_SIZE


def answer_to(prompt_token_ids: list[int], num_tokens: int) -> list[int]:
    return [token_at(prompt_token_ids, position) for position in range(num_tokens)]


@dataclass(slots=True)
class _Request:
    command: m.AddRequest
    script: Script
    position: int = 0  # of the next token
    is_leased: bool = False
    has_first_token: bool = False
    awaited: set[int] = field(default_factory=set)  # REMOTE: blocks whose fate is open
    is_running: bool = False
    unlent: set[int] = field(default_factory=set)  # PREFILL: blocks that were asked of the decode worker
    fallback_reason: str = ""

    @property
    def num_tokens(self) -> int:
        """Of the whole answer."""
        num_tokens = self.script.num_tokens
        return self.command.sampling_params.max_tokens if num_tokens is None else num_tokens

    @property
    def num_blocks(self) -> int:
        return -(-len(self.command.prompt_token_ids) // BLOCK_SIZE)


class FakeEngine:
    def __init__(self, bootstrap: Bootstrap, socket: zmq.Socket[bytes]) -> None:
        self._log = (Path(bootstrap.model_dir) / f"{bootstrap.name}.commands").open("a", buffering=1)
        self._epoch = bootstrap.epoch
        self._socket = socket
        self._requests: dict[str, _Request] = {}
        self._loans: set[str] = set()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._last_load: WorkerLoad | None = None
        self._counted: list[int] = []
        self._seen: list[str] = []  # kinds of commands since the last status

    def serve(self) -> None:
        self._emit(
            m.EngineReady(
                spec=SPEC,
                is_read_from_memory=True,
                num_blocks=NUM_BLOCKS,
                max_model_len=MAX_MODEL_LEN,
                vocab_size=VOCAB_SIZE,
                eos_token_ids=[0],
                dtype_reason="",
                device="cpu",
                device_reason="",
                peer=b"fake",
            )
        )
        self._emit(
            m.BatchTimeChanged(
                model=b"a model",
                source="file",
                version=1,
                made_at=time.monotonic(),
                num_steps=0,
                error_median=0.0,
                error_p90=0.0,
                drifts=False,
            )
        )
        self._emit(
            m.BatchTimeChanged(
                model=b"",
                source="file",
                version=1,
                made_at=time.monotonic(),
                num_steps=64,
                error_median=0.02,
                error_p90=0.25,
                drifts=True,
            )
        )
        while True:
            self._report_load()
            wait_s = max(self._due[0][0] - time.monotonic(), 0.0) if self._due else ALIVE_INTERVAL_S
            if self._socket.poll(int(min(wait_s, ALIVE_INTERVAL_S) * 1000)):
                for command in m.decode_commands(self._socket.recv()):
                    print(msgspec.json.encode(command).decode(), file=self._log)
                    self._handle(command)
            while self._due and self._due[0][0] <= time.monotonic():
                heapq.heappop(self._due)[2]()
            self._emit(m.Alive())

    # ------------------------------------------------------------------------------------------ commands

    def _handle(self, command: m.Command) -> None:
        request = self._requests.get(getattr(command, "request_id", ""))
        if not isinstance(command, m.GetStatus):
            self._seen.append(type(command).__name__)
        match command:
            case m.AddRequest():
                self._add(command)
            case m.Embed():
                if command.dimensions > 2:
                    self._emit(m.RequestFailed(command.request_id, "INVALID_ARGUMENT", "too many", "dimensions"))
                else:
                    values = [float(len(command.prompt_token_ids)), float(command.pooling is m.Pooling.MEAN)]
                    self._emit(m.Embedded(command.request_id, values, 3, 0.5))
            case m.GetStatus(call_id):
                seen, self._seen = self._seen, []
                for one in [one for one in self._requests.values() if one.is_running and one.script.on_status]:
                    self._generate(one)
                self._emit(m.Status(call_id, self._load(), ",".join(seen) or "ok"))
            case m.HintCache(call_id=call_id, block_hashes=names):
                self._emit(m.CacheHinted(call_id=call_id, num_device_blocks=len(names), failure="it is a fake"))
            case m.ProfileSteps(call_id=call_id, num_steps=num_steps, timeout_s=timeout_s, path=path):
                if timeout_s >= 1.0:
                    Path(path).write_bytes(b"a trace")
                    self._emit(m.StepsProfiled(call_id=call_id, num_steps=num_steps, seconds=0.5))
            case m.Release(request_id):
                self._requests.pop(request_id, None)
            case m.LendBlocks(request_id, first, stop) if request and not request.script.lends_nothing:
                self._loans.add(request_id)
                self._emit(m.BlocksPublished(request_id, self._refs(range(first, stop)), [], "", 0.001))
            case m.EndLoan(request_id):
                self._loans.discard(request_id)
            case m.RemoteBlocksPublished(_, blocks, failed_indexes) if request and request.unlent:
                if arrived := [ref.index for ref in blocks]:
                    self._emit(m.BlocksFetched(command.request_id, arrived, [], "", 64 * len(arrived), 0.001))
                request.unlent -= {*arrived, *failed_indexes}
                if not request.unlent:
                    self._later(0.0, command.request_id, lambda: self._prefill(request))
            case m.RemoteBlocksPublished() | m.RemoteFirstToken() if request and request.script.ignores_prefill:
                pass
            case m.RemoteBlocksPublished() if request:
                fetched = [ref.index for ref in command.blocks if ref.index in request.awaited]
                lost = [index for index in fetched if index in request.script.lost]
                arrived = [index for index in fetched if index not in lost]
                self._later(request.script.fetch_s, command.request_id, lambda: self._fetched(request, arrived, lost))
                self._fetched(request, [], list(command.failed_indexes))
            case m.RemoteFirstToken() if request:
                request.has_first_token = True
                request.position = max(request.position, 1)
                self._settle(request)
            case m.RemotePrefillFailed(_, reason) if request:
                request.fallback_reason = reason
                request.awaited.clear()
                self._settle(request, is_local=True)
            case _:
                pass

    def _add(self, command: m.AddRequest) -> None:
        request = _Request(command, script_of(command), position=len(command.output_token_ids))
        self._requests[command.request_id] = request
        self._counted.append(request_tag(command.request_id.rpartition("#")[0]))
        if request.script.is_garbage:
            self._socket.send(b"no message of ours")
        elif request.script.floods:
            flood = m.TokensGenerated(request_id=command.request_id, tokens=[SampledToken(7)] * 500)
            for _ in range(20):
                self._socket.send(m.encode([flood] * 10))
        elif command.mode is m.RequestMode.PREFILL:
            if request.script.prefill_fails:
                self._emit(m.RequestFailed(command.request_id, "INTERNAL", "the script says so"))
            elif num_lendable := command.num_lendable_blocks:
                request.unlent = set(range(num_lendable))
                self._emit(m.LoanNeeded(command.request_id, 0, num_lendable))
            elif not request.script.prefill_stalls and request.script.stall_at != 0:
                self._later(0.0, command.request_id, lambda: self._prefill(request))
        elif command.mode is m.RequestMode.REMOTE:
            stop_block = command.split_at // BLOCK_SIZE
            request.awaited = set(range(request.script.num_cached, stop_block or request.num_blocks))
            request.has_first_token = stop_block > 0
            self._emit(m.RemotePrefillNeeded(command.request_id, request.script.num_cached, stop_block))
        else:
            self._settle(request, is_local=True)

    def _prefill(self, request: _Request) -> None:
        done = m.TokensGenerated(request_id=request.command.request_id, tokens=[], num_cached_tokens=BLOCK_SIZE)
        self._emit(done if request.command.is_part else self._tokens(request))
        self._later(request.script.late_blocks_s, request.command.request_id, lambda: self._publish(request))

    def _publish(self, request: _Request) -> None:
        request.is_leased = True
        indexes = range(request.command.first_block, request.num_blocks)
        refs = self._refs([index for index in indexes if index not in request.script.unpublished])
        self._emit(m.BlocksPublished(request.command.request_id, refs, list(request.script.unpublished), "", 0.001))

    def _refs(self, indexes: Iterable[int]) -> list[BlockRef]:
        return [
            BlockRef(index=index, block_hash=bytes(16), peer="fake", epoch=self._epoch, block_id=index)
            for index in indexes
        ]

    def _fetched(self, request: _Request, arrived: list[int], lost: list[int]) -> None:
        if not arrived and not lost:
            return
        failure = "lost by the script" if lost else ""
        request.fallback_reason = request.fallback_reason or failure
        request.awaited -= {*arrived, *lost}
        self._emit(m.BlocksFetched(request.command.request_id, arrived, lost, failure, 64 * len(arrived), 0.001))
        self._settle(request)

    def _settle(self, request: _Request, *, is_local: bool = False) -> None:
        """Starts to generate, if nothing is awaited any more."""
        if request.is_running or request.awaited or not (is_local or request.has_first_token):
            return
        request.is_running = True
        if request.command.mode is m.RequestMode.REMOTE:
            self._emit(m.PrefillReceived(request.command.request_id, time.monotonic()))
        self._schedule(request)

    def _schedule(self, request: _Request) -> None:
        """Has the next token generated when the script wants it."""
        if not request.script.on_status:
            self._later(request.script.token_s, request.command.request_id, lambda: self._generate(request))

    def _generate(self, request: _Request) -> None:
        if request.position == request.script.stall_at:
            return
        self._emit(self._tokens(request))
        if request.position < request.num_tokens:
            self._schedule(request)
        else:
            del self._requests[request.command.request_id]

    def _tokens(self, request: _Request) -> m.TokensGenerated:
        token = SampledToken(token_at(request.command.prompt_token_ids, request.position))
        request.position += 1
        is_last = request.position >= request.num_tokens
        is_prefill = request.command.mode is m.RequestMode.PREFILL
        return m.TokensGenerated(
            request_id=request.command.request_id,
            tokens=[token],
            finish_reason=FinishReason.LENGTH if is_last and not is_prefill else None,
            fallback_reason=request.fallback_reason,
        )

    # ------------------------------------------------------------------------------------------ the loop

    def _later(self, delay_s: float, request_id: str, act: Callable[[], None]) -> None:
        """Acts after `delay_s`, unless the request has been released by then."""

        def act_if_alive() -> None:
            if request_id in self._requests:
                act()

        heapq.heappush(self._due, (time.monotonic() + delay_s, next(self._numbers), act_if_alive))

    def _emit(self, event: m.Event) -> None:
        self._socket.send(m.encode([event]))

    def _load(self) -> WorkerLoad:
        leased = [request for request in self._requests.values() if request.is_leased]
        num_owned = sum(request.num_blocks for request in self._requests.values()) + len(self._loans)
        return WorkerLoad(
            num_requests_running=len(self._requests) - len(leased),
            num_blocks=NUM_BLOCKS,
            num_free_blocks=NUM_BLOCKS - num_owned,
            num_leases=len(leased),
        )

    def _report_load(self) -> None:
        load, counted = self._load(), tuple(self._counted)
        if load != self._last_load or counted:
            self._last_load = load
            self._counted.clear()
            self._emit(m.LoadChanged(load, counted))


def main() -> int:
    bootstrap = msgspec.json.decode(sys.stdin.readline(), type=Bootstrap)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PAIR)
    socket.set(zmq.LINGER, 1000)
    socket.connect(bootstrap.address)
    if (failure := Path(bootstrap.model_dir) / "fails").exists():
        socket.send(m.encode([m.EngineFailed(failure.read_text())]))
        socket.close()
        return 1
    FakeEngine(bootstrap, socket).serve()
    return 0


def _end_with_parent() -> None:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
