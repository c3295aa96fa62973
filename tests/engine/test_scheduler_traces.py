"""Golden traces: a script of inputs, and the exact decisions that follow. Read the `.trace` files; they are the test.

Lines that start with `>` are decisions, everything else is input. `UPDATE_TRACES=1 make test` rewrites the decisions,
to be read in the diff.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from pathlib import Path

import pytest

from common.batch_time import BatchTime, StepShape
from common.block_hash import root_hash
from common.sampling import SamplingParams
from common.targets import LatencyTargets
from common.types import SampledToken
from engine.blocks.block_manager import BlockManager
from engine.messages import RequestMode
from engine.remote_kv import WaitingRoom
from engine.request import Request
from engine.scheduling.schedule import SchedulerConfig, SchedulerOutput, StepResult
from engine.scheduling.scheduler import Scheduler
from kv_store.base import BlockRef
from tests.support.linear_time import linear_time

TRACES = sorted((Path(__file__).parent / "traces").glob("*.trace"))


class Script:
    """Runs a trace's inputs; `lines` are the inputs with the decisions that followed."""

    def __init__(self, policy: str = "fcfs") -> None:
        """`policy`: of an engine for which the trace names none."""
        self.lines: list[str] = []
        self._policy = policy
        self.time = 0.0
        self.model: BatchTime | None = None  # if times count, each step takes what it says; else a second
        self.scheduler: Scheduler | None = None
        self.waiting_room: WaitingRoom
        self.written: deque[list[int]] = deque()  # by steps under way

    def run(self, text: str) -> str:
        for line in text.splitlines():
            if line.startswith(">"):
                continue
            self.lines.append(line)
            words = line.partition("#")[0].split()
            if words:
                options = dict(word.split("=") for word in words[1:] if "=" in word)
                names = [word for word in words[1:] if "=" not in word]
                getattr(self, f"do_{words[0]}")(*names, **options)
        return "\n".join(self.lines) + "\n"

    def say(self, text: str) -> None:
        self.lines.append(f"> {text}")

    def do_engine(self, **options: str) -> None:
        size = int(options.get("block_size", 4))
        blocks = BlockManager(
            int(options["num_blocks"]),
            size,
            root_hash("trace"),
            num_host_blocks=int(options.get("num_host_blocks", 32)),
            keep_evicted="num_host_blocks" in options,
        )
        config = SchedulerConfig(
            max_num_seqs=int(options.get("max_num_seqs", 8)),
            max_num_batched_tokens=int(options.get("budget", 64)),
            chunk_size=int(options.get("chunk_size", 16)),
            max_model_len=1000,
            eos_token_ids=frozenset(),
            preemption_mode=options.get("preemption", "recompute"),  # type: ignore[arg-type] # a word of the trace
            announce=options.get("announce", "chunk"),  # type: ignore[arg-type] # likewise
            queue_policy=options.get("policy", self._policy),  # type: ignore[arg-type] # likewise
            slo_late=options.get("late", "best-effort"),  # type: ignore[arg-type] # likewise
        )
        if config.queue_policy == "slo":
            self.model = linear_time(0.010, 0.001)
        self.waiting_room = WaitingRoom(blocks)
        known = linear_time(0.010, 0.001) if config.queue_policy == "auto" else self.model
        self.scheduler = Scheduler(config, blocks, self.waiting_room, lambda: known)

    def do_add(self, name: str, **options: str) -> None:
        first, last = map(int, options["prompt"].split(".."))
        assert self.scheduler is not None
        ttft_ms, tpot_ms = (float(options[key]) if key in options else None for key in ("ttft", "tpot"))
        self.scheduler.add(
            Request(
                request_id=name,
                token_ids=list(range(first, last)),
                num_prompt_tokens=last - first,
                sampling_params=SamplingParams(
                    max_tokens=int(options.get("max_tokens", 100)), presence_penalty=float(options.get("penalty", 0))
                ),
                arrival_time=self.time,
                mode=RequestMode(options.get("mode", "local")),
                first_block=int(options.get("first_block", 0)),
                num_stored_blocks=int(options.get("stored", 0)),
                targets=None if ttft_ms is None and tpot_ms is None else LatencyTargets(ttft_ms, tpot_ms),
            )
        )

    def do_step(self, times: str = "1", **num_drafted: str) -> None:
        """`name=3/2`: three tokens are drafted for that request, and two of them are right."""
        assert self.scheduler is not None
        asked = {name: tuple(map(int, words.split("/"))) for name, words in num_drafted.items()}
        for _ in range(int(times)):
            if self.model is None:
                self.time += 1
            drafts = {one: [0] * asked[one.request_id][0] for one in self.scheduler.decodes if one.request_id in asked}
            output = self.scheduler.schedule(self.time, drafts)
            for late in output.late:
                self.say(f"{late.request.request_id} is late{', refused' * late.is_refused}: {late.reason}")
            at = "" if self.model is None else f"{1000 * self.time:.0f} ms: "
            self.time += self.seconds(output)
            tokens = [
                [SampledToken(0)] * (1 + min(asked[request.request_id][1], len(output.drafts[request])))
                if request in output.drafts
                else [SampledToken(0)] * (num_new == request.num_missing_tokens)
                for request, num_new in output.num_tokens.items()
            ]
            result = self.scheduler.update(output, tokens)
            self.say(at + self.describe(output))
            self.say_result(output, result)
        self.say_blocks()

    def do_ahead(self, times: str = "1", ends: str = "", joins: str = "", **options: str) -> None:
        """A step, and so many more that are decided while the one before is under way. `ends` names a request that the
        first step's token ends, `joins` one that comes while that step is under way."""
        assert self.scheduler is not None
        self.time += 1
        under_way = self.scheduler.schedule(self.time)
        self.say(self.describe(under_way))
        drawing = self.begin(under_way)
        if joins:
            self.do_add(joins, **options)
        for number in range(int(times)):
            output = self.scheduler.schedule_ahead(under_way)
            self.say(f"ahead of its end: {self.describe(output)}")
            drawing_next = self.begin(output)
            if ends and not number:
                self.scheduler.release(ends)
            self.end(under_way, drawing)
            under_way, drawing = output, drawing_next
        self.end(under_way, drawing)
        self.say_blocks()

    def begin(self, output: SchedulerOutput) -> set[Request]:
        """As the engine does. The requests that a token is drawn for."""
        assert self.scheduler is not None
        written = output.written_blocks(self.scheduler.blocks.block_size)
        self.scheduler.blocks.begin_writes(written)
        drawing = {
            request
            for request, num_new in output.num_tokens.items()
            if output.after or num_new == request.num_missing_tokens
        }
        for request in drawing:
            request.num_pending += 1
        self.written.append(written)
        return drawing

    def end(self, output: SchedulerOutput, drawing: set[Request]) -> None:
        assert self.scheduler is not None
        self.scheduler.blocks.end_writes(self.written.popleft())
        for request in drawing:
            request.num_pending -= 1
        tokens = [[SampledToken(0)] * (request in drawing) for request in output.num_tokens]
        self.say_result(output, self.scheduler.update(output, tokens))

    def say_result(self, output: SchedulerOutput, result: StepResult) -> None:
        assert self.scheduler is not None
        for publish in [*output.publishes, *result.publishes]:
            indexes = [block.index for block in publish.blocks]
            self.say(f"  {publish.request.request_id} publishes blocks {indexes}")
        for new in result.tokens:
            if new.finish_reason:
                self.say(f"  {new.request.request_id} finished: {new.finish_reason}")
        assert self.scheduler.check_integrity() == []

    def say_blocks(self) -> None:
        assert self.scheduler is not None
        blocks = self.scheduler.blocks
        self.say(f"  {blocks.num_empty_blocks} empty, {blocks.num_cached_blocks} cached of {blocks.num_blocks} blocks")

    def seconds(self, output: SchedulerOutput) -> float:
        """That the step takes by the model of time, if there is one."""
        num_tokens = sum(output.num_tokens.values())
        return (
            0.0
            if self.model is None or not num_tokens
            else self.model.seconds(StepShape(num_chunks=1, chunk_tokens=num_tokens))
        )

    def describe(self, output: SchedulerOutput) -> str:
        parts = [
            f"{request.request_id}+{num_new}"
            + (f" with {len(draft)} drafted" if (draft := output.drafts.get(request)) else "")
            for request, num_new in output.num_tokens.items()
        ]
        parts += [f"preempt {request.request_id}" for request in output.preempted]
        parts += [f"{kind} {count}" for kind, count in Counter(copy.kind for copy in output.host_copies).items()]
        effects = self.waiting_room.take_effects()
        parts += [f"ask prefill for {ask.request_id} from block {ask.first_block}" for ask in effects.asks]
        for fetch in effects.store_fetches:
            parts.append(f"fetch {[block.ref.index for block in fetch.blocks]} of {fetch.request_id} from the store")
        parts += [f"no prefill needed for {request_id}" for request_id in effects.not_needed]
        return ", ".join(parts) or "nothing"

    def do_release(self, name: str) -> None:
        assert self.scheduler is not None
        self.scheduler.release(name)

    def do_announce(self, name: str, **options: str) -> None:
        first, last = map(int, options["blocks"].split(".."))
        assert self.scheduler is not None
        request, name_of = self.scheduler.requests.get(name), self.scheduler.blocks.cache.name_in_prompt
        names = [name_of(request, index) if request else b"" for index in range(last)]
        refs = [BlockRef(index=index, block_hash=names[index]) for index in range(first, last)]
        self.say(f"fetch {[block.ref.index for block in self.waiting_room.published(name, refs)]}")

    def do_arrive(self, name: str, **options: str) -> None:
        first, last = map(int, options["blocks"].split(".."))
        for index in range(first, last):
            self.waiting_room.arrived(name, index)
        self._settle()

    def do_lose(self, name: str, **options: str) -> None:
        self.waiting_room.lost(name, [int(options["block"])], "lost in the trace")
        self._settle()

    def do_first_token(self, name: str) -> None:
        assert self.scheduler is not None
        if request := self.waiting_room.first_token(name):
            self.scheduler.append(request, SampledToken(0))
        self._settle()

    def do_prefill_dies(self, name: str) -> None:
        self.waiting_room.failed(name, "prefill died")
        self._settle()

    def _settle(self) -> None:
        assert self.scheduler is not None
        for settled in self.waiting_room.take_settled():
            request = settled.request
            self.scheduler.take_back(request)
            name = request.request_id
            why = f", fallback: {request.fallback_reason}" if request.fallback_reason else ""
            self.say(f"{name} runs with {request.num_computed_tokens} of {request.num_tokens} tokens computed{why}")


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_trace(path: Path) -> None:
    wanted = path.read_text()
    got = Script().run(wanted)
    if os.environ.get("UPDATE_TRACES"):
        path.write_text(got)
    assert got == wanted


@pytest.mark.parametrize("path", [one for one in TRACES if one.stem != "slo"], ids=lambda path: path.stem)
def test_without_targets_auto_decides_as_fcfs(path: Path) -> None:
    wanted = path.read_text()
    assert Script("auto").run(wanted) == wanted


def test_there_are_traces() -> None:
    assert TRACES
