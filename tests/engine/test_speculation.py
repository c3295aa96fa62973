"""Speculation changes how many steps an answer takes, and nothing else."""

from __future__ import annotations

from array import array
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import metrics
from common.batch_time import FEATURES, BatchTime, Regime, RegimeTime, StepShape, Table
from common.block_hash import block_hashes
from common.sampling import SamplingParams
from common.types import FinishReason
from engine import messages as m
from engine.request import Request
from engine.scheduling.schedule import SchedulerConfig
from engine.speculation.ngram import continuation
from engine.speculation.record import PROBE_STEPS, DraftRecord
from engine.speculation.speculation import Speculation
from engine.speculation.step_cost import cost_by_rows, free_rows
from tests.common.test_batch_time import KEY
from tests.examples import examples
from tests.support.fake_device import (
    BLOCK_SIZE,
    VOCAB_SIZE,
    add,
    assert_idle,
    make_core,
    next_token,
    reference,
    run,
    tokens_of,
)

prompts = st.lists(st.integers(0, 20), min_size=1, max_size=30)


class Oracle:
    """Knows the answers, and errs at every `errs_at`-th token of each."""

    cost = 0.0

    def __init__(self, errs_at: int = 10**9) -> None:
        self.errs_at = errs_at
        self.lengths: list[int] = []

    def draft(self, lengths: Mapping[Request, int]) -> dict[Request, list[int]]:
        self.lengths += lengths.values()
        return {request: self.continuation(request, length) for request, length in lengths.items()}

    def continuation(self, request: Request, length: int) -> list[int]:
        known = list(request.token_ids)
        for _ in range(length):
            is_wrong = (len(known) - request.num_prompt_tokens) % self.errs_at == self.errs_at - 1
            known.append((next_token(known) + is_wrong) % (VOCAB_SIZE - 1))
        return known[request.num_tokens :]


@pytest.mark.parametrize(
    ("known", "num", "wanted"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3], 2, [4, 9]),
        ([1, 2, 3, 4, 9, 1, 2, 3], 7, [4, 9, 1, 2, 3, 4, 9]),  # beyond its end it repeats
        ([7, 7, 7], 3, [7, 7, 7]),
        ([1, 2, 5, 0, 1, 2, 6, 0, 1, 2], 1, [6]),  # the latest of equally long ones
        ([8, 1, 2, 5, 0, 9, 1, 2, 6, 8, 1, 2], 1, [5]),  # the longest before the latest
        ([1, 2, 3, 1], 4, []),  # one token is no evidence
        ([1, 2, 3, 4], 4, []),
        ([1], 4, []),
        ([1, 1], 4, []),
    ],
)
def test_text_goes_on_as_it_went_on_before(known: list[int], num: int, wanted: list[int]) -> None:
    assert continuation(array("i", known), num) == wanted


def test_drafts_grow_while_they_come_true_and_end_when_they_do_not() -> None:
    record = DraftRecord()
    lengths = []
    for _ in range(6):
        lengths.append(record.next_length(1, 8, cost_by_rows(4.0)))
        record.count(lengths[-1], lengths[-1])
    assert lengths == sorted(lengths)
    assert lengths[-1] == 8
    steps = []
    for _ in range(20 + 2 * PROBE_STEPS):
        steps.append(record.next_length(1, 8, cost_by_rows(4.0)))
        if steps[-1]:
            record.count(steps[-1], 0)
    assert sum(steps[20:]) == 2, "one token now and then"


def test_the_more_requests_share_a_step_the_shorter_drafts_are() -> None:
    lengths = []
    for num_requests in (1, 4, 16, 64, 256):
        record = DraftRecord(hits=9.0, trials=10.0)
        lengths.append(record.next_length(num_requests, 8, cost_by_rows(8.0)))
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] >= 6
    assert lengths[-1] == 0
    record = DraftRecord(hits=9.0, trials=10.0)
    assert record.next_length(64, 8, cost_by_rows(64.0)) > 0, "a device reads its weights for longer"


@pytest.mark.parametrize(
    ("instruction_set", "bytes_per_weight", "is_bfloat16", "step_ms"),
    [
        ("avx2", 4.0, False, {1: 24.5, 4: 26.2, 8: 43.1}),  # measured: docs/speculation.md
        ("avx2", 2.0, True, {1: 13.0, 4: 18.8, 8: 36.7}),
        ("avx2", 1.06, False, {1: 8.1, 4: 19.2, 8: 37.2}),
        ("avx512_bf16", 2.0, True, {1: 8.8, 8: 12.5, 32: 37.0}),
    ],
)
def test_the_cost_of_a_step_is_near_what_steps_took(
    instruction_set: str, bytes_per_weight: float, is_bfloat16: bool, step_ms: dict[int, float]
) -> None:
    rows = free_rows("cpu", instruction_set, bytes_per_weight, is_bfloat16=is_bfloat16)
    for num_rows, ms in step_ms.items():
        wanted = ms / step_ms[1]
        assert cost_by_rows(rows)(num_rows) / cost_by_rows(rows)(1) == pytest.approx(wanted, rel=0.25)


def test_if_a_row_costs_as_much_as_reading_the_weights_only_one_request_drafts() -> None:
    record = DraftRecord(hits=9.0, trials=10.0)
    rows = free_rows("cpu", "avx2", 2.0, is_bfloat16=True)
    assert record.next_length(1, 8, cost_by_rows(rows)) > 0
    assert record.next_length(8, 8, cost_by_rows(rows)) == 0


def test_what_stands_behind_a_wrong_token_counts_for_nothing() -> None:
    record = DraftRecord(hits=0.0, trials=0.0)
    record.count(8, 2)
    assert (record.hits, record.trials) == (2, 3)
    assert (record.num_drafted, record.num_accepted) == (8, 2)


@pytest.mark.parametrize("errs_at", [1, 2, 5, 10**9])
def test_the_answer_is_the_same_in_fewer_steps(errs_at: int) -> None:
    before = counted()
    core, runner = make_core(drafter=Oracle(errs_at))
    add(core, "a", [1, 2, 3, 4, 5], max_tokens=40)
    events = run(core)
    assert tokens_of(events)["a"] == reference([1, 2, 3, 4, 5], 40)
    num_steps = len(runner.num_tokens_per_step)
    assert num_steps == 40 if errs_at == 1 else num_steps < 40
    last = events[-1]
    assert isinstance(last, m.TokensGenerated)
    assert last.num_accepted_tokens == 40 - num_steps
    assert last.num_drafted_tokens >= last.num_accepted_tokens
    accepted, refused = (after - earlier for after, earlier in zip(counted(), before, strict=True))
    assert (accepted, accepted + refused) == (last.num_accepted_tokens, last.num_drafted_tokens)
    assert (refused > 0) is (errs_at < 40)
    assert_idle(core)


def counted() -> tuple[float, float]:
    """`baton_worker_draft_tokens_total` of this process: (accepted, refused)."""
    accepted, refused = (
        metrics.worker_draft_tokens.labels(outcome)._value.get() for outcome in ("accepted", "refused")
    )
    return accepted, refused


def test_a_request_may_decline() -> None:
    oracle = Oracle()
    core, runner = make_core(drafter=oracle)
    add(core, "a", [1, 2, 3], params=SamplingParams(temperature=0.0, max_tokens=9, speculate=False))
    assert tokens_of(run(core))["a"] == reference([1, 2, 3], 9)
    assert len(runner.num_tokens_per_step) == 9
    assert not oracle.lengths


def test_no_setting_no_speculation() -> None:
    core, runner = make_core()
    add(core, "a", [1, 2, 1, 2, 1, 2], max_tokens=5)
    run(core)
    assert len(runner.num_tokens_per_step) == 5


@pytest.mark.parametrize("end", ["stop", "length", "context"])
def test_an_answer_ends_where_it_would(end: str) -> None:
    """In the middle of what was drafted, at any of the first places."""
    prompt = [3, 1, 4]
    for place in range(2, 14):
        answer = reference(prompt, place)
        params = {"temperature": 0.0, "max_tokens": place if end == "length" else 150}
        if end == "stop":
            params["stop_token_ids"] = (answer[-1],)
            answer = answer[: answer.index(answer[-1]) + 1]
        core, runner = make_core(drafter=Oracle(), num_blocks=5 if end == "context" else 64)
        if end == "context":
            answer = reference(prompt, runner.info.max_model_len - len(prompt))
        add(core, "a", prompt, params=SamplingParams(**params))  # type: ignore[arg-type]
        events = run(core)
        assert tokens_of(events)["a"] == answer
        wanted = FinishReason.STOP if end == "stop" else FinishReason.LENGTH
        assert [event.finish_reason for event in events if isinstance(event, m.TokensGenerated)][-1] is wanted
        assert_idle(core)


def test_refused_tokens_have_no_name() -> None:
    core, _ = make_core(drafter=Oracle(errs_at=3))
    prompt = [5, 6, 7]
    add(core, "a", prompt, max_tokens=60)
    run(core)
    whole = prompt + reference(prompt, 60)
    assert core.blocks.names() == set(block_hashes(core.blocks.cache._root_hash, whole[:-1], BLOCK_SIZE))
    add(core, "turn two", whole, max_tokens=5)
    assert tokens_of(run(core))["turn two"] == reference(whole, 5)


def test_a_release_in_mid_step_disturbs_nobody() -> None:
    core, _ = make_core(drafter=Oracle(), num_blocks=20)
    add(core, "a", [1, 2, 3], max_tokens=30)
    add(core, "b", [4, 5, 6], max_tokens=30)
    core.step()
    output = core.prepare()
    assert output.drafts
    core.end(core.begin(output), lambda: core.handle(m.Release("a")))
    answer = tokens_of([*core.take_events(), *run(core)])["b"]
    assert answer == reference([4, 5, 6], 30)
    assert_idle(core)


@settings(max_examples=examples(30), deadline=None)
@given(
    requests=st.lists(st.tuples(prompts, st.integers(1, 24), st.booleans()), min_size=1, max_size=8),
    errs_at=st.integers(1, 12),
    num_blocks=st.integers(14, 30),
    chunk_size=st.integers(1, 16),
    budget=st.integers(4, 32),
    mode=st.sampled_from(["recompute", "swap"]),
    host_cache_gb=st.sampled_from([0.0, 3e-7]),  # none, or ten blocks
    released=st.sets(st.integers(0, 7), max_size=3),
    when=st.integers(0, 12),
)
def test_any_mixture_gives_the_reference_answers(
    requests: list[tuple[list[int], int, bool]],
    errs_at: int,
    num_blocks: int,
    chunk_size: int,
    budget: int,
    mode: str,
    host_cache_gb: float,
    released: set[int],
    when: int,
) -> None:
    core, runner = make_core(
        drafter=Oracle(errs_at),
        num_blocks=num_blocks,
        chunk_size=chunk_size,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        preemption_mode=mode,
        swap_space_gb=1e-6,
        host_cache_gb=host_cache_gb,
    )
    for number, (prompt, max_tokens, speculate) in enumerate(requests):
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, speculate=speculate)
        add(core, str(number), prompt, params=params)
    events = []
    for _ in range(when):
        core.step()
        events += core.take_events()
        assert core.scheduler.check_integrity() == []
    for number in released:
        core.handle(m.Release(str(number)))
    answers = tokens_of(events + run(core))
    for number, (prompt, max_tokens, _) in enumerate(requests):
        if number not in released:
            assert answers[str(number)] == reference(prompt, max_tokens)
    assert max(runner.num_tokens_per_step, default=0) <= budget
    assert_idle(core)


def test_a_known_time_of_steps_decides_instead_of_the_estimate() -> None:
    """As many rows as they may are free on one device, and each costs as much as the first on the other."""

    def drafted(floor_s: float, row_s: float) -> int:
        layers = Table((0.0,), (floor_s,), row_s)
        regime = RegimeTime(layers=layers, head=Table(), coefficients=(0.0,) * len(FEATURES))
        time = BatchTime(key=KEY, regimes=dict.fromkeys(Regime, regime))
        speculation = Speculation(Repeats(), 8, CONFIG, 4.0, lambda: time)
        request = Request(
            request_id="r",
            token_ids=[1, 2],
            num_prompt_tokens=1,
            sampling_params=SamplingParams(temperature=0.0, max_tokens=50),
            arrival_time=0.0,
            drafts=DraftRecord(hits=9.0, trials=10.0),
        )
        shape = StepShape(num_decodes=1, decode_context=2, longest_context=2, num_head_rows=1)
        return len(speculation.drafts([request], shape).get(request, []))

    assert drafted(1.0, 1e-6) == 8
    assert drafted(0.0, 1.0) == 0


class Repeats:
    cost = 0.0

    def draft(self, lengths: Mapping[Request, int]) -> dict[Request, list[int]]:
        return {request: [5] * length for request, length in lengths.items()}


CONFIG = SchedulerConfig(
    max_num_seqs=8, max_num_batched_tokens=64, chunk_size=64, max_model_len=100, eos_token_ids=frozenset()
)
