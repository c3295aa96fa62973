"""Decisions of a router whose workers said how long their steps take."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.batch_time import BatchTime, BatchTimeKey, ChunkTime, Regime, RegimeTime, StepShape, Table
from common.batch_time_file import encode
from protos.baton.v1 import worker_pb2
from router.fleet.endpoint import Endpoint
from router.fleet.track_record import MIN_ANSWERS, TrackRecord
from router.fleet.worker_info import MAX_MODEL_BYTES, batch_time_of
from router.policy.base import RoutingDecision, RoutingRequest
from router.policy.costs import CHUNK, SecondCosts, all_know_their_times, prompt_s, step_s
from router.policy.registry import create_policy
from router.running.prefill_times import LATE_FACTOR, MIN_LATE_S, LikePrompts, PrefillTimes
from tests.router.test_policy import fleet

KEY = BatchTimeKey(spec="s", quantization="none", device="cpu", processor="p", kernels="k", num_threads=1)


def model(floor_s: float = 0.01, token_s: float = 0.001, pair_s: float = 0.0) -> BatchTime:
    """A step takes `floor_s`, `token_s` for each new token and `pair_s` for each token that one attends to."""
    layers = Table((0.0,), (floor_s,), token_s)
    regime = RegimeTime(layers=layers, head=Table(), coefficients=(pair_s, 0.0, pair_s, *(0.0,) * 7))
    return BatchTime(key=KEY, regimes=dict.fromkeys(Regime, regime))


def workers(text: str, **models: BatchTime) -> list[Endpoint]:
    return [replace(one, batch_time=models.get(one.address, model())) for one in fleet(text)]


def pick(
    endpoints: list[Endpoint], num_tokens: int = 1000, name: str = "prefix_aware", *, hedges: bool = False
) -> RoutingDecision:
    request = RoutingRequest(num_prompt_tokens=num_tokens, fingerprint="f")
    return create_policy(name, hedges=hedges).pick(request, endpoints)


def test_seconds_count_only_if_all_workers_know_theirs() -> None:
    known = workers("d decode 0/0 9/9\np prefill 0/0 9/9")
    assert pick(known).prefill_s is not None
    assert all_know_their_times(known)
    assert not all_know_their_times([])
    decision = pick([*known, *fleet("q prefill 0/0 9/9")])
    assert (decision.prefill_s, decision.step_s) == (None, None)


def test_a_prompt_s_chunks_are_summed() -> None:
    one = model(pair_s=1e-5)
    alone = sum(
        one.seconds(
            StepShape(
                num_chunks=1, chunk_tokens=new, chunk_past=past, chunk_pairs=new * past + new * (new + 1) // 2,
            )
        )
        for new, past in ((CHUNK, 100), (CHUNK, 100 + CHUNK), (CHUNK, 100 + 2 * CHUNK), (70, 100 + 3 * CHUNK))
    )  # fmt: skip
    assert prompt_s(ChunkTime(one), 3 * CHUNK + 70, 100) == pytest.approx(alone)
    assert prompt_s(ChunkTime(one), 0, 100) == 0


def test_a_faster_worker_is_worth_a_longer_queue() -> None:
    text = "d decode 0/0 9/9\np prefill 0/0 9/9 queued=1000\nq prefill 0/0 9/9"
    assert [one.address for one in pick(workers(text)).prefill] == ["q", "p"]
    faster = workers(text, p=model(token_s=0.0001))
    assert [one.address for one in pick(faster).prefill] == ["p", "q"]
    assert pick(faster).prefill_s == pytest.approx(2 * (0.02 + 0.1), rel=0.1)


def test_a_batch_that_costs_nothing_more_is_no_load() -> None:
    """A device that reads its weights for longer than it multiplies answers twenty as fast as two."""
    text = "a decode 20/0 9/9\nb decode 2/0 9/9"
    assert pick(workers(text)).decode.address == "b"
    free = workers(text, a=model(token_s=1e-7), b=model(token_s=1e-7, floor_s=0.012))
    assert pick(free).decode.address == "a"
    assert pick(free, name="least_load").decode.address == "a"


def test_an_idle_fleet_hands_prompts_over() -> None:
    idle = workers("d decode 0/0 9/9\np prefill 0/0 9/9")
    for num_tokens in (16, 300, 3000, 30_000):
        decision = pick(idle, num_tokens)
        assert [one.address for one in decision.prefill] == ["p"]
        assert not decision.in_place


def test_a_prompt_is_computed_in_place_if_the_prefill_worker_is_far_behind() -> None:
    behind = "d decode {}/0 9/9\np prefill 0/0 9/9 queued={}"
    assert pick(workers(behind.format(0, 1000))).in_place is False
    decision = pick(workers(behind.format(0, 9000)))
    assert decision.in_place
    told = "in place 2744 ms (wait 704 ms, computing 1020 ms, lost by its decodes 1020 ms)"
    assert any(told in line for line in decision.reasons.lines())
    assert pick(workers(behind.format(20, 9000))).in_place is False, "twenty decodes would wait for it"


def test_a_few_tokens_are_computed_beside_decodes_if_asking_takes_longer() -> None:
    """The fewest tokens for which a prefill worker is asked: the decode worker applies it to what it lacks."""
    text = "d decode 2/0 9/9\np prefill 0/0 9/9"
    slow_to_ask = workers(text, d=model(token_s=1e-4), p=model(floor_s=0.03, token_s=1e-4))
    decision = pick(slow_to_ask, 60)
    assert (decision.in_place, decision.prefill) == (True, ())
    assert 60 < (least := SecondCosts().least_remote(slow_to_ask[0], slow_to_ask[1], 0)) < 120
    assert decision.min_remote_tokens == least
    assert pick(slow_to_ask, least + 1).prefill
    decode, prefill = workers("d decode 0/0 9/9\np prefill 0/0 9/9")
    assert SecondCosts().least_remote(decode, prefill, 0) == 0


def test_hedges_know_what_a_prompt_should_take() -> None:
    times = PrefillTimes()
    assert times.late_s(1000, None) is None
    assert times.late_s(1000, 2.0) == LATE_FACTOR * 2.0
    assert times.late_s(1000, 0.001) == MIN_LATE_S
    for _ in range(32):
        times.came(1000, 3.0, 2.0)
    assert times.late_s(1000, 2.0) == LATE_FACTOR * 3.0, "all take longer than predicted"
    behind = "d decode 0/0 9/9\np prefill 0/0 9/9\nq prefill 0/0 9/9 queued={}"
    assert pick(workers(behind.format(1000)), hedges=True).may_hedge
    assert not pick(workers(behind.format(9000)), hedges=True).may_hedge


def test_a_worker_of_a_slower_kind_is_not_slow() -> None:
    like = LikePrompts()
    assert like.times_usual(1000, 1000, 5.0, 4.9) == pytest.approx(5.0 / 4.9)
    assert like.times_usual(1000, 1000, 0.03, 0.01) == 1.0

    def state(step_s: float | None) -> str:
        track = TrackRecord()
        for address, pace_s in (("a", 0.01), ("b", 0.01), ("c", 0.01), ("slow", 0.2)):
            for _ in range(MIN_ANSWERS):
                said = step_s if address == "slow" else 0.01
                track.succeeded((address, "e"), 0.0, 101, 100 * pace_s, said)
        return track.state(("slow", "e"), 0.0)

    assert state(None) == "slow"
    assert state(0.2) == "closed", "as slow as it said"
    assert state(0.05) == "slow"


def test_the_next_step_has_those_that_wait() -> None:
    (one,) = workers("d decode 4/2 1/9 unreported=1")
    assert step_s(one, num_more=1) == pytest.approx(0.01 + 8 * 0.001)


@pytest.mark.parametrize(
    ("text", "context", "seconds"),
    [
        ("d decode 0/0 9/9", 0, 0.01 + 0.001),
        ("d decode 0/0 9/9 unreported=2", 2000, 0.01 + 3 * (0.001 + 0.01)),
        ("d decode 0/1 9/9 unreported=2", 2000, 0.01 + 4 * (0.001 + 0.01)),
        ("d decode 1/0 0/100 unreported=2", 2000, 0.01 + 4 * (0.001 + 0.016)),  # like the one that runs
    ],
)
def test_requests_that_no_report_counts_have_a_context(text: str, context: int, seconds: float) -> None:
    (one,) = workers(text, d=model(pair_s=1e-5))
    assert step_s(replace(one, num_unreported_context=context), num_more=1) == pytest.approx(seconds)


def test_an_empty_worker_does_not_get_all_requests_until_its_next_report() -> None:
    """Four decodes of 1,000 tokens run on each other worker. Their steps take longer for their context alone."""
    lines = ["empty decode 0/0 1000/1000", *(f"d{number} decode 4/0 750/1000" for number in range(9))]
    sent = dict.fromkeys([one.split()[0] for one in lines], 0)
    fleet_of_ten = workers("\n".join(lines), **dict.fromkeys(sent, model(token_s=1e-7, pair_s=1e-6)))
    for _ in range(40):
        now = [
            replace(one, num_unreported=sent[one.address], num_unreported_context=1000 * sent[one.address])
            for one in fleet_of_ten
        ]
        sent[pick(now).decode.address] += 1
    assert 7 <= sent["empty"] <= 9, sent
    assert all(3 <= num <= 4 for name, num in sent.items() if name != "empty"), sent


# ------------------------------------------------------------------------------------ what workers say


def info(data: bytes, source: str = "learned") -> worker_pb2.WorkerInfo:
    return worker_pb2.WorkerInfo(batch_time=worker_pb2.BatchTime(model=data, source=source))


def test_a_model_that_a_worker_is_sure_of_is_used() -> None:
    said = batch_time_of(info(encode(model())))
    assert said is not None
    assert said.seconds(StepShape(num_decodes=3)) == pytest.approx(0.013)
    assert batch_time_of(info(encode(model()), "quick")) is None
    assert batch_time_of(worker_pb2.WorkerInfo()) is None


@pytest.mark.parametrize(
    "data",
    [
        b"{}",
        b"\xff",
        encode(model()).replace(b'"schema": 1', b'"schema": 2'),
        encode(model()).replace(b'"decode_context": 0.0', b'"decode_context": -1.0'),
        encode(model()).replace(b'"p90": 0.0', b'"p90": 1e999'),
        encode(model()).replace(b"0.01", b"-0.01"),
        encode(model()) + b" " * MAX_MODEL_BYTES,
    ],
)
def test_a_model_that_cannot_be_is_none(data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    assert batch_time_of(info(data)) is None
    assert "model of time is not used" in caplog.text


def test_what_a_load_costs_follows_the_load() -> None:
    costs = SecondCosts()
    (one,) = workers("d decode 1/0 9/9 queued=100")
    before = costs.queue(one), costs.load(one)
    assert before == (costs.queue(one), costs.load(one))
    (other,) = workers("d decode 5/0 9/9 queued=300")
    assert (costs.queue(other), costs.load(other)) > before
    assert costs.load(other) > before[1]


def test_what_moves_after_the_first_token_is_what_handoffs_took() -> None:
    """Two milliseconds a token, of the last chunk alone; before anybody knows, a quarter of computing them."""
    known = workers("d decode 0/0 9/9\np prefill 0/0 9/9")
    request = RoutingRequest(num_prompt_tokens=2000, fingerprint="f")
    for token_s, handoff in ((None, "510 ms"), (0.002, "1024 ms")):
        made = create_policy("prefix_aware").pick(replace(request, handoff_token_s=token_s), known)
        assert any(f"handoff {handoff})" in line for line in made.reasons.lines())
    slow = create_policy("prefix_aware").pick(replace(request, handoff_token_s=0.02), known)
    assert slow.in_place
