"""Steps that begin before the one before has ended: the same answers, and no block lost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.sampling import SamplingParams
from common.targets import LatencyTargets
from common.types import FinishReason
from engine import messages as m
from engine.core import MAX_AHEAD, EngineCore
from engine.device import Ticket, do_nothing
from engine.step import StepInput, StepOutput, StepRow
from tests.engine.test_remote_kv import make_pair
from tests.examples import examples
from tests.support.fake_device import FakeDevice, add, assert_idle, make_core, reference, run, still, tokens_of
from tests.support.linear_time import linear_time


class WatchedDevice(FakeDevice):
    """Notes what it is asked for: ("begin" or "end", number of the step)."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.calls: list[tuple[str, int]] = []
        self.steps: list[Sequence[StepRow]] = []

    def begin(self, step: StepInput) -> Ticket:
        self.calls.append(("begin", step.number))
        self.steps.append(step.rows)
        return super().begin(step)

    def end(self, ticket: Ticket, meanwhile: Callable[[], None] = do_nothing) -> StepOutput:
        self.calls.append(("end", ticket.number))
        return super().end(ticket, meanwhile)

    @property
    def num_ahead(self) -> int:
        """How many steps had a token by reference in each row."""
        return sum(all(row.first is not None for row in rows) for rows in self.steps)


class EarlyDevice(WatchedDevice):
    """Has computed each step when `begin` returns: the engine learns of it later."""

    def begin(self, step: StepInput) -> Ticket:
        ticket = super().begin(step)
        self._results[step.number] = self.compute_step(self._begun.pop(step.number), do_nothing)
        return ticket

    def end(self, ticket: Ticket, meanwhile: Callable[[], None] = do_nothing) -> StepOutput:
        self.calls.append(("end", ticket.number))
        meanwhile()
        return self._results.pop(ticket.number)

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._results: dict[int, StepOutput] = {}


def watched(**settings: object) -> tuple[EngineCore, WatchedDevice]:
    core, device = make_core(device_type=WatchedDevice, clock=still, run_ahead=True, **settings)
    assert isinstance(device, WatchedDevice)
    return core, device


def test_a_step_begins_before_the_one_before_has_ended() -> None:
    core, device = watched()
    add(core, "a", [1, 2, 3], max_tokens=4)
    assert tokens_of(run(core))["a"] == reference([1, 2, 3], 4)
    assert device.calls == [
        ("begin", 1),
        ("begin", 2),
        ("end", 1),
        ("begin", 3),
        ("end", 2),
        ("begin", 4),
        ("end", 3),
        ("end", 4),
    ]
    assert_idle(core)


def test_without_the_setting_each_step_ends_first() -> None:
    core, device = make_core(device_type=WatchedDevice)
    add(core, "a", [1, 2, 3], max_tokens=4)
    run(core)
    assert isinstance(device, WatchedDevice)
    assert device.calls == [(call, number) for number in range(1, 5) for call in ("begin", "end")]


@dataclass(frozen=True)
class Asked:
    prompt: list[int]
    max_tokens: int
    comes: int  # before this turn
    goes: int | None  # is released in mid-step of this turn, or after it
    stops_at: int | None  # a token of this index in the answer ends it
    is_penalised: bool

    @property
    def params(self) -> SamplingParams:
        stop = () if self.stops_at is None else (reference(self.prompt, self.stops_at + 1)[-1],)
        penalty = 1.5 if self.is_penalised else 0.0
        return SamplingParams(
            temperature=0.0, max_tokens=self.max_tokens, stop_token_ids=stop, presence_penalty=penalty
        )

    @property
    def answer(self) -> list[int]:
        tokens = reference(self.prompt, self.max_tokens)
        stops = [index for index, token in enumerate(tokens) if token in self.params.stop_token_ids]
        return tokens[: stops[0] + 1] if stops else tokens


# Some prompts begin alike.
prompts = st.builds(
    lambda shared, own: [*range(shared), *own],
    st.sampled_from([0, 4, 9]),
    st.lists(st.integers(0, 20), min_size=1, max_size=14),
)
asked = st.builds(
    Asked,
    prompt=prompts,
    max_tokens=st.integers(1, 20),
    comes=st.integers(0, 12),
    goes=st.none() | st.integers(0, 20),
    stops_at=st.none() | st.integers(0, 10),
    is_penalised=st.sampled_from([False, False, False, True]),
)
engines = st.fixed_dictionaries(
    {
        "num_blocks": st.sampled_from([14, 20, 64]),
        "chunk_size": st.sampled_from([3, 8, 64]),
        "max_num_seqs": st.sampled_from([2, 4, 8]),
        "device_type": st.sampled_from([WatchedDevice, EarlyDevice]),
    },
    optional={
        "preemption_mode": st.just("swap"),
        "host_cache_gb": st.just(1e-6),
        "enable_prefix_caching": st.just(False),
        "queue_policy": st.just("priority"),
    },
)


def play(script: Sequence[Asked], engine: dict[str, object], *, run_ahead: bool) -> dict[str, list[int]]:
    """The answers of all requests; every one that is not released ends."""
    core, device = make_core(run_ahead=run_ahead, swap_space_gb=1e-6, **engine)
    assert isinstance(device, WatchedDevice)
    events: list[m.Event] = []
    has_gone: set[int] = set()
    is_busy, turn = True, 0

    def meanwhile() -> None:
        for number, one in enumerate(script):
            if one.goes == turn and one.comes <= turn and number not in has_gone:
                has_gone.add(number)
                core.handle(m.Release(str(number)))
        core.take_in_transfers()
        core.begin_remote()

    while is_busy or turn <= 20:
        for number, one in enumerate(script):
            if one.comes == turn:
                add(core, str(number), one.prompt, params=one.params)
        is_busy = core.end(core.begin(core.prepare()), meanwhile)
        meanwhile()
        events += core.take_events()
        assert core.scheduler.check_integrity() == []
        turn += 1
        assert turn < 2000
    assert_idle(core)
    assert not [event for event in events if isinstance(event, m.RequestFailed)]
    for rows in device.steps:
        if any(row.first is not None for row in rows):
            assert all(row.draw is not None and row.draw.edits is None for row in rows)
    answers = tokens_of(events)
    for number, one in enumerate(script):
        answer = answers.get(str(number), [])
        assert answer == one.answer[: len(answer)]
        assert number in has_gone or answer == one.answer
    return answers


@settings(max_examples=examples(40))
@given(st.lists(asked, min_size=1, max_size=7), engines)
def test_answers_are_the_same(script: list[Asked], engine: dict[str, object]) -> None:
    """With arrivals, cancels in mid-step, stops, chunks, preemption, swaps, cached prefixes and penalties."""
    ahead, plain = (play(script, engine, run_ahead=run_ahead) for run_ahead in (True, False))
    for number, one in enumerate(script):
        if one.goes is None:
            assert ahead[str(number)] == plain[str(number)]


@settings(max_examples=examples(40))
@given(st.lists(prompts, min_size=1, max_size=4), st.sampled_from([12, 64]), st.sampled_from([3, 64]))
def test_remote_prompts_get_the_same_answers(asked: list[list[int]], num_blocks: int, chunk_size: int) -> None:
    pair = make_pair(decode_blocks=num_blocks, chunk_size=chunk_size, run_ahead=True)
    for number, prompt in enumerate(asked):
        pair.add(str(number), prompt)
        pair.round()
    pair.run()
    assert pair.answers == {str(number): reference(prompt, 8) for number, prompt in enumerate(asked)}
    pair.assert_idle()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0, max_tokens=6, repetition_penalty=1.2),
        SamplingParams(temperature=0.0, max_tokens=6, logit_bias={3: 1.0}),
        SamplingParams(temperature=0.0, max_tokens=6, min_tokens=3),
        SamplingParams(temperature=0.0, max_tokens=6, allowed_token_ids=(1, 2)),
    ],
)
def test_who_needs_the_token_before_waits_for_it_and_is_not_left_behind(params: SamplingParams) -> None:
    core, device = watched()
    add(core, "plain", [1, 2, 3], max_tokens=6)
    add(core, "edited", [4, 5], params=params)
    run(core)
    assert device.num_ahead == 0
    assert len(device.steps) == 6


def test_drafts_need_the_token_before() -> None:
    core, device = watched(speculation="ngram")
    add(core, "a", [1, 2, 3, 1, 2, 3], max_tokens=6)
    assert tokens_of(run(core))["a"] == reference([1, 2, 3, 1, 2, 3], 6)
    assert device.num_ahead == 0


def test_a_newcomer_is_in_the_next_step_if_that_has_not_begun() -> None:
    core, device = watched(chunk_size=64)
    add(core, "first", [1, 2, 3], max_tokens=9)
    core.step()
    add(core, "second", [4, 5], max_tokens=9)
    core.step()  # it waits, so the first step has to end
    core.step()
    assert [[len(row.token_ids) for row in rows] for rows in device.steps] == [[3], [1, 2]]
    assert tokens_of(run(core)) == {"second": reference([4, 5], 9), "first": reference([1, 2, 3], 9)}


def test_a_full_engine_runs_ahead_until_a_place_becomes_free() -> None:
    core, device = watched(max_num_seqs=1)
    add(core, "first", [1, 2, 3], max_tokens=4)
    add(core, "second", [4, 5], max_tokens=4)
    assert tokens_of(run(core)) == {"first": reference([1, 2, 3], 4), "second": reference([4, 5], 4)}
    assert len(device.steps) == 8
    assert device.num_ahead == 6


def test_who_waits_for_a_place_gets_it_in_the_next_step() -> None:
    core, device = watched(max_num_seqs=2)
    for request_id, max_tokens in (("short", 3), ("long", 8), ("third", 2)):
        add(core, request_id, [len(request_id)], max_tokens=max_tokens)
    run(core)
    assert [len(rows) for rows in device.steps] == [2, 2, 2, 2, 2, 1, 1, 1]


def test_nothing_is_computed_beyond_an_end_that_is_known() -> None:
    core, device = watched()
    add(core, "short", [1, 2, 3], max_tokens=3)
    add(core, "long", [4, 5], max_tokens=5)
    run(core)
    assert [len(rows) for rows in device.steps] == [2, 2, 2, 1, 1]


@pytest.mark.parametrize("is_shared", [False, True])
def test_what_follows_an_end_that_was_not_known_is_dropped(is_shared: bool) -> None:
    answer = reference([7, 7, 7], 8)
    core, device = watched()
    if is_shared:
        add(core, "other", [1, 2], max_tokens=12)
    add(core, "a", [7, 7, 7], params=SamplingParams(temperature=0.0, max_tokens=50, stop_token_ids=(answer[3],)))
    events = run(core)
    assert tokens_of(events)["a"] == answer[:4]
    (end,) = [event for event in events if getattr(event, "finish_reason", None) and event.request_id == "a"]
    assert end.finish_reason is FinishReason.STOP
    assert [row.num_computed_tokens for rows in device.steps for row in rows if row.num_computed_tokens == 6], "begun"
    if is_shared:
        assert tokens_of(events)["other"] == reference([1, 2], 12)
    assert_idle(core)


@pytest.mark.parametrize("device_type", [WatchedDevice, EarlyDevice])
def test_a_block_that_a_dropped_row_writes_goes_to_nobody_before_that_step_has_ended(device_type: type) -> None:
    core, _ = make_core(num_blocks=6, device_type=device_type, clock=still, run_ahead=True, enable_prefix_caching=False)
    answer = reference([1] * 6, 3)
    stop = SamplingParams(temperature=0.0, max_tokens=9, stop_token_ids=(answer[2],))
    add(core, "first", [1] * 6, params=stop)  # ends with the token at position 8, the first one of its third block
    add(core, "other", [2] * 3, max_tokens=9)
    written: set[int] = set()
    while "first" in core.scheduler.requests:
        begun = core.begin(core.prepare())
        tables = [one.block_ids for one in begun.output.num_tokens if one.request_id == "first"]
        written = {table[2] for table in tables if len(table) > 2}
        core.end(begun)
    assert len(written) == 1
    add(core, "third", [3] * 12, mode=m.RequestMode.REMOTE)
    taken: list[int] = []

    def meanwhile() -> None:
        core.begin_remote()
        taken.extend(core.scheduler.requests["third"].block_ids)

    core.end(core.begin(core.prepare()), meanwhile)
    assert not written.intersection(taken)
    assert core.scheduler.check_integrity() == []


@pytest.mark.parametrize("device_type", [WatchedDevice, EarlyDevice])
@pytest.mark.parametrize("num_steps", range(4))
def test_a_device_that_stops_leaves_no_block_behind(device_type: type[FakeDevice], num_steps: int) -> None:
    core, device = make_core(device_type=device_type, clock=still, run_ahead=True)
    add(core, "a", [1, 2, 3], max_tokens=9)
    add(core, "b", [4, 5, 6, 7, 8], max_tokens=9)
    for _ in range(num_steps):
        core.step()
    device.fail_next = True
    events = core.take_events() + run(core)
    failed = [event.request_id for event in events if isinstance(event, m.RequestFailed)]
    assert sorted(failed) == ["a", "b"], "each is told of once"
    assert_idle(core)
    add(core, "c", [4, 5])
    assert tokens_of(run(core))["c"] == reference([4, 5], 8)


def test_a_failure_is_not_of_the_request_that_has_the_id_now() -> None:
    core, device = make_core(device_type=EarlyDevice, clock=still, run_ahead=True)
    add(core, "a", [1, 2, 3], max_tokens=9)
    core.step()
    device.fail_next = True
    core.begin(core.prepare())
    core.handle(m.Release("a"))
    core.take_events()
    add(core, "a", [4, 5])
    events = run(core)
    assert tokens_of(events)["a"] == reference([4, 5], 8)
    assert not [event for event in events if isinstance(event, m.RequestFailed)]
    assert_idle(core)


@pytest.mark.parametrize("where", ["begin", "end"])
def test_an_error_of_the_device_leaves_no_block_held(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    core, device = watched()
    add(core, "a", [1, 2, 3], max_tokens=9)
    core.step()
    core.step()

    def fail(*_: object) -> None:
        raise RuntimeError("it is gone")

    with monkeypatch.context() as patch:
        patch.setattr(device, where, fail)
        with pytest.raises(RuntimeError, match="it is gone"):
            core.step()
    core.handle(m.Release("a"))
    run(core)
    assert_idle(core)


def test_housekeeping_has_its_turn() -> None:
    core, device = watched()
    add(core, "a", [1, 2, 3], max_tokens=3 * MAX_AHEAD)
    run(core)
    ahead = [all(row.first is not None for row in rows) for rows in device.steps]
    assert len(ahead) == 3 * MAX_AHEAD
    assert ahead.count(False) == 3
    assert not any(ahead[:: MAX_AHEAD + 1])


def test_by_slack_each_step_is_decided_when_the_last_one_has_ended() -> None:
    core, device = watched(batch_time=linear_time(0.010, 0.001), queue_policy="slo")
    add(core, "a", [1, 2, 3], max_tokens=5, targets=LatencyTargets(ttft_ms=1000, tpot_ms=100))
    run(core)
    assert device.num_ahead == 0


def test_a_traced_request_is_told_when_the_device_came_to_its_step() -> None:
    now = 0.0

    class Slow(WatchedDevice):
        def end(self, ticket: Ticket, meanwhile: Callable[[], None] = do_nothing) -> StepOutput:
            nonlocal now
            now += 1.0
            return super().end(ticket, meanwhile)

    core, _ = make_core(device_type=Slow, clock=lambda: now, run_ahead=True)
    add(core, "a", [1, 2, 3], max_tokens=4, traceparent="00-1-1-01")
    traced = [event for event in run(core) if isinstance(event, m.StepTraced)]
    assert [(one.num_computed_tokens, one.start, one.end) for one in traced] == [(0, 0.0, 1.0), (3, 1.0, 2.0)]


def test_a_step_that_a_profiler_looks_at_begins_alone() -> None:
    core, device = watched()
    add(core, "a", [1, 2, 3], max_tokens=8)
    core.step()
    core.step()
    core.may_run_ahead = lambda: False
    core.step()
    num_begun = len(device.steps)
    core.step()
    assert device.calls[-2:] == [("begin", num_begun + 1), ("end", num_begun + 1)]
