"""`--queue-policy slo` and `auto`: who is computed when, if a step takes 10 ms and one more for each token."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import metrics
from common.batch_time import BatchTime, StepShape
from common.config import EngineSettings
from common.sampling import SamplingParams
from common.targets import LatencyTargets
from common.types import SLACKS_S
from engine import messages as m
from engine.core import EngineCore
from engine.request import Request, RequestStatus
from engine.scheduling.equal_prompts import EqualPrompts
from engine.scheduling.slack import BEST_EFFORT_S, SlackPolicy
from engine.scheduling.waiting_queue import SlackQueue
from kv_store.base import ConnectorConfig
from kv_store.memory import MemoryConnector
from tests.support.fake_device import BLOCK_SIZE, TimedDevice, add, assert_idle, make_core, reference, run, tokens_of
from tests.support.linear_time import linear_time

TIME = linear_time(0.010, 0.001)


class Timed:
    """An engine, and when its tokens came."""

    def __init__(
        self,
        *,
        time: BatchTime | None = TIME,
        num_blocks: int = 500,
        device: TimedDevice | None = None,
        **options: object,
    ) -> None:
        """On `device`, or on one that it makes."""
        self.time = time
        self.device = device or TimedDevice(lambda step: (time or TIME).seconds(step.shape), num_blocks)
        self.core = EngineCore(
            EngineSettings.model_validate({"block_size": BLOCK_SIZE, "queue_policy": "slo", **options}),
            self.device,
            MemoryConnector(ConnectorConfig(epoch="e1", worker_id="timed")),
            lambda: self.device.now,
            lambda: None,
            batch_time=lambda: self.time,
        )
        self.token_times: dict[str, list[float]] = {}
        self.preempted: dict[str, int] = {}
        self.failures: dict[str, m.RequestFailed] = {}
        self._numbers = itertools.count()

    def ask(
        self,
        request_id: str,
        num_prompt: int,
        max_tokens: int = 1,
        *,
        ttft_ms: float | None = None,
        tpot_ms: float | None = None,
        age_s: float = 0.0,
        priority: int = 0,
        mode: m.RequestMode = m.RequestMode.LOCAL,
    ) -> None:
        number = next(self._numbers)
        add(
            self.core,
            request_id,
            [number] * num_prompt,
            params=SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
            targets=None if ttft_ms is None and tpot_ms is None else LatencyTargets(ttft_ms, tpot_ms),
            asked_time=self.device.now - age_s,
            priority=priority,
            mode=mode,
        )

    def step(self, times: int = 1) -> bool:
        for _ in range(times):
            has_computed = self.core.step()
            for event in self.core.take_events():
                if isinstance(event, m.TokensGenerated):
                    self.token_times.setdefault(event.request_id, []).extend([self.device.now] * len(event.tokens))
                    self.preempted[event.request_id] = event.num_preemptions
                elif isinstance(event, m.RequestFailed):
                    self.failures[event.request_id] = event
            if not has_computed:
                return False
        return True

    def run(self) -> None:
        while self.step():
            pass
        self.step()
        assert_idle(self.core)

    @property
    def order(self) -> list[str]:
        """Ids in the order of their first tokens."""
        return list(self.token_times)

    def tpot_ms(self, request_id: str) -> float:
        times = self.token_times[request_id]
        return 1000 * (times[-1] - times[0]) / (len(times) - 1)


def test_the_least_slack_is_first() -> None:
    engine = Timed(max_num_seqs=1)
    engine.ask("runs", 10, 5)
    engine.step()
    engine.ask("whenever", 10)
    engine.ask("later", 10, ttft_ms=5000)
    engine.ask("soon", 10, ttft_ms=500)
    engine.ask("old", 10, ttft_ms=5000, age_s=4.6)
    engine.run()
    assert engine.order == ["runs", "old", "soon", "later", "whenever"]


def test_a_long_prompt_has_less_slack_than_a_short_one_of_the_same_target() -> None:
    engine = Timed(max_num_seqs=1)
    engine.ask("runs", 10, 5)
    engine.step()
    engine.ask("short", 10, ttft_ms=1000)
    engine.ask("long", 400, ttft_ms=1000)
    engine.run()
    assert engine.order == ["runs", "long", "short"]


def test_running_and_waiting_prompts_are_in_one_order() -> None:
    """A newcomer overtakes a prompt of which chunks are computed already."""
    engine = Timed(max_num_batched_tokens=64, chunk_size=64)
    engine.ask("long", 640)
    engine.step(2)
    engine.ask("urgent", 100, ttft_ms=300)
    engine.run()
    assert engine.order == ["urgent", "long"]


@pytest.mark.parametrize("policy", ["fcfs", "slo"])
def test_a_decode_keeps_its_pace_beside_a_long_prompt(policy: str) -> None:
    engine = Timed(queue_policy=policy)
    engine.ask("chat", 10, 60, tpot_ms=50)
    engine.step(3)
    engine.ask("long", 1000)
    engine.run()
    times = engine.token_times["chat"]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    if policy == "fcfs":
        assert max(gaps) > 0.5
        return
    assert engine.tpot_ms("chat") <= 50
    assert max(gaps) <= 0.050  # however far it is ahead of its pace
    assert engine.token_times["long"][0] < times[-1], "the prompt went on beside it"


@pytest.mark.parametrize("policy", ["fcfs", "slo"])
def test_newcomers_wait_while_one_more_decode_would_cost_the_others_their_target(policy: str) -> None:
    engine = Timed(queue_policy=policy)
    names = [str(number) for number in range(20)]
    for name in names:
        engine.ask(name, 4, 30, tpot_ms=20)
    engine.run()
    worst = max(map(engine.tpot_ms, names))
    assert worst > 20 if policy == "fcfs" else worst <= 20


def test_answers_decode_together_however_noisy_single_steps_are() -> None:
    """Nine in ten steps stay below twice the median: four answers keep a pace of 20 ms all the same, in steps of 14."""
    noisy = {name: replace(regime, p90=math.log(2), p99=math.log(3)) for name, regime in TIME.regimes.items()}
    engine = Timed(time=replace(TIME, regimes=noisy))
    for number in range(4):
        engine.ask(str(number), 4, 30, ttft_ms=1000, tpot_ms=20)
    engine.run()
    assert max(engine.token_times[str(number)][0] for number in range(4)) < 0.1
    assert max(engine.tpot_ms(str(number)) for number in range(4)) <= 20


def test_best_effort_sits_out_steps_that_would_be_too_long_with_it() -> None:
    engine = Timed()
    for number in range(20):
        engine.ask(f"best effort {number}", 4, 60)
    engine.step(2)
    engine.ask("urgent", 4, 40, ttft_ms=1000, tpot_ms=20)
    engine.run()
    assert engine.token_times["urgent"][0] < engine.token_times["best effort 0"][-1]
    assert engine.tpot_ms("urgent") <= 20
    gaps = [later - earlier for times in engine.token_times.values() for earlier, later in itertools.pairwise(times)]
    assert max(gaps) < 0.7


@pytest.mark.parametrize(
    ("targets", "reason"),
    [
        ({"ttft_ms": 100.0}, "its first token takes another 110 ms and is due in 100 ms"),
        ({"ttft_ms": 500.0, "age_s": 0.45}, "its first token takes another 110 ms and is due in 50 ms"),
        ({"ttft_ms": 500.0, "tpot_ms": 5.0}, "no step is as short as its target for a token, 5 ms"),
        ({"tpot_ms": 5.0}, "no step is as short as its target for a token, 5 ms"),
    ],
)
@pytest.mark.parametrize("late", ["refuse", "best-effort"])
def test_who_cannot_be_in_time_is_refused_or_served_as_best_effort(
    late: str, targets: dict[str, float], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    engine = Timed(slo_late=late)
    engine.ask("late", 100, 3, **targets)
    engine.ask("in time", 10, 3, ttft_ms=500)
    engine.run()
    (record,) = [one for one in caplog.records if "latency targets" in one.message]
    assert vars(record)["request_id"] == "late"
    assert vars(record)["reason"] == reason
    assert len(engine.token_times["in time"]) == 3
    if late == "refuse":
        failure = engine.failures["late"]
        assert failure.grpc_code == "RESOURCE_EXHAUSTED"
        assert reason in failure.reason
        assert "late" not in engine.token_times
    else:
        assert not engine.failures
        assert len(engine.token_times["late"]) == 3


@pytest.mark.parametrize("mode", [m.RequestMode.LOCAL, m.RequestMode.PREFILL])
@pytest.mark.parametrize("late", ["refuse", "best-effort"])
def test_a_further_step_of_a_search_is_never_refused(
    late: str, mode: m.RequestMode, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    engine = Timed(slo_late=late)
    engine.ask("chat", 4, 60, tpot_ms=40)
    engine.step(3)
    targets = LatencyTargets(40, None)
    add(engine.core, "step", [1] * 5, 1, targets=targets, asked_time=engine.device.now, is_follow_up=True, mode=mode)
    engine.device.now += 0.038
    engine.step(20)
    assert not engine.failures
    assert "step" in engine.token_times
    assert not [one for one in caplog.records if "latency targets" in one.message]


def test_a_further_step_of_a_search_that_is_late_goes_on_before_others() -> None:
    """As a late decode does."""
    engine = Timed(max_num_seqs=1)
    engine.ask("runs", 10, 9, tpot_ms=50)
    engine.step()
    engine.ask("other", 10, ttft_ms=5000)
    add(
        engine.core,
        "step",
        [1] * 5,
        1,
        targets=LatencyTargets(40, None),
        asked_time=engine.device.now,
        is_follow_up=True,
    )
    engine.run()
    assert engine.order == ["runs", "step", "other"]


def test_who_waited_until_it_cannot_be_in_time_is_refused_then() -> None:
    engine = Timed(slo_late="refuse", max_num_seqs=1)
    engine.ask("runs", 10, 50, tpot_ms=1000)
    engine.step()
    engine.ask("waits", 100, ttft_ms=300)
    engine.step(5)
    assert not engine.failures
    engine.run()
    assert "its first token takes another 110 ms" in engine.failures["waits"].reason
    assert len(engine.token_times["runs"]) == 50


def test_its_load_says_how_soon_queued_prompts_have_to_begin() -> None:
    """What routers predict a newcomer's first token by."""
    engine = Timed(max_num_seqs=1)
    engine.ask("runs", 10, 20, tpot_ms=1000)
    engine.step()
    for request_id, num_prompt, ttft_ms in (("soon", 100, 600.0), ("later", 200, 3000.0), ("whenever", 400, None)):
        engine.ask(request_id, num_prompt, ttft_ms=ttft_ms)
    engine.step()
    load, by_slack = engine.core.load, dict(zip(SLACKS_S, engine.core.load.queued_by_slack, strict=True))
    assert (load.num_queued_prompts, load.num_queued_prompt_tokens) == (3, 700)
    assert [by_slack[slack] for slack in (0.25, 0.5, 2.0, 4.0, 32.0)] == [0, 100, 100, 300, 300]
    engine.run()
    assert (engine.core.load.num_queued_prompts, set(engine.core.load.queued_by_slack)) == (0, {0})
    for idle in (Timed(queue_policy="slo"), Timed(queue_policy="auto")):
        assert set(idle.core.load.queued_by_slack) == {0}, "before its first step, too"
    for other in (Timed(time=None), Timed(queue_policy="fcfs")):
        assert other.core.load.queued_by_slack == ()
        other.ask("one", 100, ttft_ms=500)
        other.step()
        assert other.core.load.queued_by_slack == (), "targets do not decide the order"


def test_a_prompt_that_makes_several_others_late_goes_after_them() -> None:
    engine = Timed(max_num_seqs=1, chunk_size=2048)
    engine.ask("runs", 10, 2)
    engine.step()
    engine.ask("huge", 1500, ttft_ms=1700)
    for number in range(4):
        engine.ask(str(number), 100, ttft_ms=1000)
    engine.run()
    assert engine.order == ["runs", "0", "1", "2", "3", "huge"]


@pytest.mark.parametrize("late", ["refuse", "best-effort"])
@pytest.mark.parametrize("mode", [m.RequestMode.LOCAL, m.RequestMode.PREFILL])
@pytest.mark.parametrize(("ttft_ms", "is_told"), [(1_700, True), (2_200, False)])
def test_who_would_make_several_others_late_is_refused_if_it_is_late_after_them(
    ttft_ms: float, is_told: bool, mode: m.RequestMode, late: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    counter = metrics.worker_late_requests.labels("refused" if late == "refuse" else "best_effort", "others")
    before = counter._value.get()
    engine = Timed(max_num_seqs=1, chunk_size=2048, slo_late=late)
    engine.ask("runs", 10, 2)
    engine.step()
    engine.ask("huge", 1500, ttft_ms=ttft_ms, mode=mode)
    for number in range(4):
        engine.ask(str(number), 100, ttft_ms=1000)
    engine.step(12)
    assert engine.order[:5] == ["runs", "0", "1", "2", "3"]
    told = [vars(one)["cause"] for one in caplog.records if "latency targets" in one.message]
    assert told == ["others"] * is_told
    assert counter._value.get() - before == is_told
    if is_told and late == "refuse":
        assert "would make 4 others late, and it waits 440 ms" in engine.failures["huge"].reason
        assert "huge" not in engine.token_times
    else:
        assert not engine.failures
        assert (engine.token_times["huge"][0] <= ttft_ms / 1000) is not is_told, "who says nothing is in time"


def test_a_further_step_of_a_search_is_not_put_behind_those_that_it_makes_late() -> None:
    engine = Timed(max_num_seqs=1, chunk_size=2048, slo_late="refuse")
    engine.ask("runs", 10, 2)
    engine.step()
    targets = LatencyTargets(1_700, None)
    add(engine.core, "step", [1] * 1500, 1, targets=targets, asked_time=engine.device.now, is_follow_up=True)
    for number in range(4):
        engine.ask(str(number), 100, ttft_ms=1000)
    engine.run()
    assert engine.order[:2] == ["runs", "step"]
    assert "step" not in engine.failures


def test_nobody_starves() -> None:
    """Prompts with targets come faster than they can be computed; one without any is answered nevertheless."""
    time = linear_time(0.1, 0.01)
    engine = Timed(time=time, slo_late="refuse", max_num_seqs=4, max_num_batched_tokens=128, chunk_size=128)
    engine.ask("patient", 300, 4)
    numbers = itertools.count()
    while len(engine.token_times.get("patient", ())) < 4:
        for _ in range(3):
            engine.ask(str(next(numbers)), 100, ttft_ms=10_000, tpot_ms=3000)
        engine.step()
        assert engine.device.now < 2 * BEST_EFFORT_S
    assert engine.device.now > BEST_EFFORT_S / 2, "those with targets went first"
    engine.run()
    assert engine.failures


def test_best_effort_makes_room_for_a_request_with_targets_once() -> None:
    engine = Timed(max_num_seqs=2)
    engine.ask("long", 10, 200)
    engine.step()
    engine.ask("longer", 10, 300)
    engine.step(3)
    engine.ask("urgent", 10, 20, ttft_ms=400)
    engine.step()
    assert not engine.core.scheduler.requests["longer"].num_preemptions, "the others may end by themselves"
    engine.run()
    assert engine.token_times["urgent"][0] < 0.5
    assert (engine.preempted["long"], engine.preempted["longer"], engine.preempted["urgent"]) == (0, 1, 0)
    assert [len(engine.token_times[name]) for name in ("long", "longer")] == [200, 300]


@pytest.mark.parametrize(
    ("room", "reason"),
    [
        ({"max_num_seqs": 1}, "a request with latency targets gets its place; raise --max-num-seqs"),
        (
            {"num_blocks": 60},
            "KV blocks ran out; raise --kv-cache-memory-gb or --num-blocks, or lower --max-num-seqs",
        ),
    ],
)
def test_the_engine_goes_on_if_it_displaces_its_only_request(
    room: dict[str, int], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    engine = Timed(**room)
    engine.ask("long", 150, 80)
    engine.step(3)
    engine.ask("urgent", 100, 2, ttft_ms=500)
    engine.run()
    assert engine.preempted == {"urgent": 0, "long": 1}
    assert engine.token_times["urgent"][0] < 0.7
    assert len(engine.token_times["long"]) == 80
    assert [one.message for one in caplog.records if "preempted" in one.message] == [f"preempted: {reason}"]


@pytest.mark.parametrize(
    "mode",
    [{}, {"enable_prefix_caching": False}, {"preemption_mode": "swap", "swap_space_gb": 1e-4}],
    ids=["cached", "not cached", "swap"],
)
@pytest.mark.parametrize("ttft_ms", [5_000, 20_000])
def test_a_place_is_kept_for_the_request_that_it_was_made_for(ttft_ms: float, mode: dict[str, object]) -> None:
    """However soon the displaced request is to go on."""
    engine = Timed(max_num_seqs=4, num_blocks=2000, **mode)
    names = [str(number) for number in range(4)]
    for name in names:
        engine.ask(name, 400, 900)
    engine.step(8)
    asked_at = engine.device.now
    engine.ask("urgent", 10, 5, ttft_ms=ttft_ms)
    while "urgent" not in engine.token_times:
        assert engine.step()
    assert engine.token_times["urgent"][0] - asked_at < 0.6 * ttft_ms / 1000
    assert sorted(engine.core.scheduler.requests[name].num_preemptions for name in names) == [0, 0, 0, 1]


def pressing(engine: Timed, prompt: list[int], *, ttft_ms: float, tpot_ms: float | None = None) -> None:
    """A request of which more than half of the time is gone at the next step."""
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    targets = LatencyTargets(ttft_ms, tpot_ms)
    add(engine.core, "urgent", prompt, params=params, targets=targets, asked_time=engine.device.now)
    engine.device.now += 0.6 * ttft_ms / 1000


def num_displaced(engine: Timed) -> int:
    return sum(one.num_preemptions for one in engine.core.scheduler.requests.values())


def test_nobody_is_displaced_for_blocks_that_are_cached() -> None:
    engine = Timed(num_blocks=60)
    prefix = list(range(64))
    for number in range(2):
        params = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
        add(engine.core, str(number), [*prefix, 500 + number], params=params)
        engine.step(2)
    while engine.core.scheduler.blocks.num_available_blocks > 12:
        assert engine.step()
    pressing(engine, [*prefix, 900], ttft_ms=300)
    engine.step()
    assert num_displaced(engine) == 0
    assert "urgent" in engine.token_times


def test_nobody_is_displaced_for_a_request_that_waits_for_the_prompt_of_another() -> None:
    engine = Timed(max_num_seqs=2, max_num_batched_tokens=64, chunk_size=64)
    engine.ask("decodes", 4, 200)
    engine.step(2)
    prompt = list(range(640))
    add(engine.core, "same", prompt, max_tokens=2)
    engine.step(2)
    pressing(engine, prompt, ttft_ms=5000)
    engine.step()
    assert num_displaced(engine) == 0


def test_nobody_is_displaced_for_a_request_that_may_not_join_the_decodes() -> None:
    engine = Timed(max_num_seqs=8)
    engine.ask("best effort", 4, 300)
    for number in range(7):
        engine.ask(str(number), 4, 300, tpot_ms=50)
    engine.step(12)
    assert len(engine.core.scheduler.decodes) == 8
    pressing(engine, [7] * 4, ttft_ms=600, tpot_ms=15)
    engine.step()
    assert num_displaced(engine) == 0
    assert not engine.core.scheduler.requests["urgent"].pace.is_late  # type: ignore[union-attr] # it has one


def test_best_effort_alone_is_in_the_order_of_arrival_however_long_it_waits() -> None:
    engine = Timed(time=linear_time(1.0, 0.1), max_num_seqs=1, chunk_size=100)
    names = [str(number) for number in range(12)]
    for name in names[:6]:
        engine.ask(name, 40 if int(name) % 2 else 80)
    engine.step(4)
    for name in names[6:]:
        engine.ask(name, 40 if int(name) % 2 else 80)
        engine.step()
    engine.run()
    assert engine.order == names
    assert engine.device.now > 2 * BEST_EFFORT_S


@pytest.mark.parametrize("priority", [-2, -3, -50])
def test_best_effort_of_high_priority_is_first_however_high_it_is(priority: int) -> None:
    engine = Timed(max_num_seqs=1)
    engine.ask("runs", 10, 5)
    engine.step()
    engine.ask("normal", 10)
    engine.ask("urgent", 10, priority=priority)
    engine.run()
    assert engine.order == ["runs", "urgent", "normal"]


@pytest.mark.parametrize("priority", [-2, -3, -50])
@pytest.mark.parametrize("num_running", [0, 1])
def test_best_effort_does_not_go_before_requests_with_targets_once_its_time_is_over(
    priority: int, num_running: int
) -> None:
    """However high its priority is: as a prompt that waits, and as one that runs in chunks."""
    engine = Timed(max_num_seqs=8, max_num_batched_tokens=64, chunk_size=64)
    engine.ask("best effort", 640, priority=priority)
    engine.step(num_running)
    engine.device.now += 20.0  # less than after which best effort has waited too long
    for number in range(3):
        engine.ask(str(number), 100, ttft_ms=2_000)
    engine.run()
    assert engine.order[-1] == "best effort"


@settings(max_examples=4, deadline=None)
@given(
    patient=st.lists(
        st.tuples(st.integers(1, 250), st.sampled_from((-50, -3, -1, 0, 1)), st.integers(0, 12)),
        min_size=1,
        max_size=4,
    ),
    policy=st.sampled_from(("slo", "auto")),
)
def test_best_effort_of_any_priority_is_answered_in_a_time_that_is_bounded(
    patient: list[tuple[int, int, int]], policy: str
) -> None:
    """Though requests with targets ask for three times as much as there is. `patient`: tokens, priority, and when."""
    time = linear_time(0.1, 0.01)
    engine = Timed(time=time, queue_policy=policy, slo_late="refuse", max_num_batched_tokens=128, chunk_size=128)
    numbers = itertools.count()
    to_come = sorted(enumerate(patient), key=lambda one: one[1][2])
    alone_s = sum(0.01 * num_prompt + 0.1 * (num_prompt // 128 + 1) for num_prompt, _, _ in patient)
    while sum(name.startswith("patient") for name in engine.token_times) < len(patient):
        while to_come and to_come[0][1][2] <= engine.device.now:
            number, (num_prompt, priority, _) = to_come.pop(0)
            engine.ask(f"patient {number}", num_prompt, priority=priority)
        for _ in range(3):
            engine.ask(str(next(numbers)), 100, ttft_ms=10_000, tpot_ms=3000)
        engine.step()
        # The last one comes after 12 s and has a priority of 10 s. All have waited too long 30 s after that, and then
        # have an eighth of the time, one after the other.
        assert engine.device.now < 12 + 10 + BEST_EFFORT_S + 12 * alone_s + 10
    engine.run()


@pytest.mark.parametrize("num_prompt", [1, 3, 12, 16])
def test_a_short_prompt_that_waited_too_long_gets_its_share(num_prompt: int) -> None:
    """Though decodes take all the time that their targets leave."""
    time = linear_time(0.001, 0.040)
    engine = Timed(time=time, max_num_seqs=64, num_blocks=4000, enable_prefix_caching=False)
    for number in range(7):
        engine.ask(str(number), 4, 300, tpot_ms=310)
    engine.step(8)
    while engine.core.scheduler.num_waiting:
        engine.step()
    asked_at = engine.device.now
    engine.ask("waits", num_prompt, 2, ttft_ms=15)  # too late at once: best effort
    while "waits" not in engine.token_times:
        assert engine.step()
        assert len(engine.core.scheduler.requests) > 7, "decodes go on"
    assert engine.token_times["waits"][0] - asked_at > BEST_EFFORT_S / 2


def test_a_prefill_has_no_target_for_tokens_to_miss(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    engine = Timed()
    targets = LatencyTargets(5000, 5)  # no step is that short
    add(engine.core, "prefill", [1] * 20, targets=targets, asked_time=0.0, mode=m.RequestMode.PREFILL)
    engine.step(3)
    assert "prefill" in engine.token_times
    assert not [one for one in caplog.records if "latency targets" in one.message]


@pytest.mark.parametrize("late", ["refuse", "best-effort"])
def test_a_prefill_worker_refuses_what_cannot_be_in_time(late: str) -> None:
    engine = Timed(slo_late=late)
    engine.ask("late", 100, ttft_ms=100, mode=m.RequestMode.PREFILL)
    engine.ask("in time", 100, ttft_ms=5000, mode=m.RequestMode.PREFILL)
    engine.step(5)
    if late == "refuse":
        assert engine.order == ["in time"]
        assert engine.failures["late"].grpc_code == "RESOURCE_EXHAUSTED"
        assert "its first token takes another 110 ms" in engine.failures["late"].reason
    else:
        assert engine.order == ["in time", "late"], "it is held back"
    for name in ("late", "in time"):
        engine.core.handle(m.Release(name))
    engine.step()
    assert_idle(engine.core)


@pytest.mark.parametrize("late", ["refuse", "best-effort"])
@pytest.mark.parametrize(("ttft_ms", "is_late"), [(500, False), (150, True)])
def test_who_no_prefill_worker_computes_in_time_may_be_refused_by_its_decode_worker(
    ttft_ms: float, is_late: bool, late: str
) -> None:
    engine = Timed(slo_late=late)
    engine.ask("remote", 100, 2, ttft_ms=ttft_ms, mode=m.RequestMode.REMOTE)
    engine.step()
    assert [type(event) for event in engine.core.take_events()] != [m.RequestFailed]
    engine.device.now += 0.1
    engine.core.handle(m.RemotePrefillFailed("remote", "prefill worker a:1: RESOURCE_EXHAUSTED: too late"))
    engine.run()
    if is_late and late == "refuse":
        reason = engine.failures["remote"].reason
        assert "takes another 110 ms and is due in 50 ms; prefill worker a:1: RESOURCE_EXHAUSTED" in reason
        assert not engine.token_times
    else:
        assert not engine.failures
        assert len(engine.token_times["remote"]) == 2


def test_a_prompt_of_which_a_prefill_worker_brought_a_part_is_not_refused() -> None:
    engine = Timed(slo_late="refuse", num_blocks=60)
    engine.ask("remote", 100, 2, ttft_ms=150, mode=m.RequestMode.REMOTE)
    engine.step()
    scheduler = engine.core.scheduler
    request = scheduler.requests["remote"]
    engine.device.now += 0.2
    engine.core.handle(m.RemotePrefillFailed("remote", "it died"))
    request.num_computed_tokens = 3 * BLOCK_SIZE  # as if three blocks had come
    engine.step(3)
    assert not engine.failures
    assert len(engine.token_times["remote"]) == 2


def test_auto_goes_by_slack_while_a_request_with_targets_is_here() -> None:
    engine = Timed(queue_policy="auto", max_num_seqs=1)
    engine.ask("runs", 10, 5)
    engine.step()
    for name in ("first", "second"):
        engine.ask(name, 10)
    engine.step()
    assert not engine.core.load.goes_by_slack
    engine.ask("soon", 10, 3, ttft_ms=500)
    engine.step()
    assert engine.core.load.goes_by_slack
    while "soon" not in engine.token_times:
        engine.step()
    assert metrics.worker_goes_by_slack._value.get() == 1
    while engine.core.scheduler.requests.get("soon") is not None:
        engine.step()
    assert not engine.core.load.goes_by_slack
    assert metrics.worker_goes_by_slack._value.get() == 0
    engine.ask("third", 10)
    engine.run()
    assert engine.order == ["runs", "soon", "first", "second", "third"]
    assert engine.preempted["runs"] == 0


def test_auto_goes_back_to_the_order_of_arrival() -> None:
    """Whoever had begun is first. A request with targets may end anywhere: waiting, too."""
    engine = Timed(queue_policy="auto", max_num_seqs=2)
    engine.ask("long", 10, 200)
    engine.step()
    engine.ask("longer", 10, 300)
    engine.step(3)
    for number in range(4):
        engine.ask(str(number), 10 * (4 - number))
    engine.ask("urgent", 10, 20, ttft_ms=400)
    while "urgent" not in engine.token_times:
        engine.step()
    assert engine.core.scheduler.requests["longer"].num_preemptions == 1
    engine.ask("waits", 10, ttft_ms=60_000)
    engine.core.handle(m.Release("urgent"))
    engine.core.handle(m.Release("waits"))
    engine.step()
    assert not engine.core.load.goes_by_slack
    assert all(one.pace is None for one in engine.core.scheduler.requests.values())
    engine.run()
    assert engine.order == ["long", "longer", "urgent", "0", "1", "2", "3"]
    assert [len(engine.token_times[name]) for name in ("long", "longer")] == [200, 300]


def test_auto_stays_by_arrival_until_it_is_known_how_long_steps_take() -> None:
    engine = Timed(queue_policy="auto", time=None, max_num_seqs=1)
    engine.ask("runs", 10, 9)
    engine.step()
    for name, ttft_ms in (("whenever", None), ("soon", 500), ("sooner", 400)):
        engine.ask(name, 10, 2, ttft_ms=ttft_ms)
    engine.step()
    assert not engine.core.load.goes_by_slack
    engine.time = TIME
    engine.step()
    assert engine.core.load.goes_by_slack
    engine.run()
    assert engine.order == ["runs", "sooner", "soon", "whenever"]


def test_a_lease_is_no_request_with_targets_for_auto() -> None:
    engine = Timed(queue_policy="auto", chunk_size=16)
    engine.ask("prefill", 20, ttft_ms=5000, mode=m.RequestMode.PREFILL)
    engine.step()
    assert engine.core.load.goes_by_slack
    engine.step()
    assert engine.core.load.num_leases == 1
    assert not engine.core.load.goes_by_slack


def test_a_waiting_request_is_watched_once_however_often_the_model_of_time_changes() -> None:
    engine = Timed(max_num_seqs=1)
    engine.ask("runs", 10, 50)
    engine.step(2)
    engine.ask("waits", 10, ttft_ms=50_000)
    for _ in range(20):
        engine.time = linear_time(0.010, 0.001)
        engine.step()
    assert engine.core.scheduler.slack is not None
    assert len(engine.core.scheduler.slack._watched) == 1
    engine.run()


class Asking:
    """A decode worker's order by slack, and prompts that prefill workers compute."""

    def __init__(self) -> None:
        scheduler = Timed().core.scheduler
        self.now = 100.0
        self._policy = SlackPolicy(scheduler.config, scheduler.blocks, lambda: TIME)
        self._policy.begin(self.now)
        self._queue = SlackQueue(EqualPrompts(scheduler.blocks, scheduler._waiting_room))
        self._parked: list[Request] = []

    def ask(self) -> bool:
        """A request with half a second until its first token comes and is admitted. Returns whether it is expected to
        be in time."""
        self.plan([])
        request = Request(
            request_id="",
            token_ids=[1] * 40,
            num_prompt_tokens=40,
            sampling_params=SamplingParams(max_tokens=9),
            arrival_time=self.now,
            mode=m.RequestMode.REMOTE,
            targets=LatencyTargets(500, None),
        )
        self._policy.enter(request)
        self._queue.add(request)
        self._policy.look_ahead([], self._parked, self.now)
        assert self._policy.take_late(self._queue, self.now) == []
        self._queue.remove(request)
        request.scheduled_time, request.status = self.now, RequestStatus.WAITING_FOR_REMOTE_KV
        self._parked.append(request)
        self._policy.admitted(request, self.now)
        assert request.pace is not None
        return not request.pace.is_late

    def answer(self, after_s: float) -> None:
        """The first token of the oldest one comes."""
        self.now += after_s
        request = self._parked.pop(0)
        request.status, request.num_computed_tokens = RequestStatus.RUNNING, 40
        request.token_ids.append(1)
        self.plan([request])

    def plan(self, decodes: list[Request]) -> None:
        self._policy.plan(decodes, StepShape(num_decodes=len(decodes)), self.now, has_blocks=True)


@pytest.mark.parametrize("num_at_once", [1, 3])
def test_prefill_workers_that_were_slow_once_are_asked_in_time_again(num_at_once: int) -> None:
    asking = Asking()
    for _ in range(8):
        asking.ask()
    for _ in range(8):
        asking.answer(after_s=5.0)
    assert not asking.ask()
    asking.answer(after_s=0.05)
    for _ in range(40):
        last = [asking.ask() for _ in range(num_at_once)]
        for _ in range(num_at_once):
            asking.answer(after_s=0.05)
        asking.now += 100.0  # nobody is waited for
    assert all(last)


def test_the_request_with_the_most_slack_is_preempted() -> None:
    engine = Timed(num_blocks=24)
    engine.ask("chat", 8, 30, ttft_ms=1000, tpot_ms=40)
    engine.ask("whenever", 8, 30)
    engine.ask("other chat", 8, 30, ttft_ms=1000, tpot_ms=40)
    engine.run()
    assert engine.preempted["whenever"] > 0
    assert engine.preempted["chat"] == engine.preempted["other chat"] == 0


def test_without_a_model_of_time_requests_are_in_the_order_of_priority() -> None:
    engine = Timed(time=None, max_num_seqs=1)
    engine.ask("runs", 10, 5)
    engine.step()
    engine.ask("later", 10, ttft_ms=100)
    engine.ask("sooner", 10, priority=-1)
    engine.run()
    assert engine.order == ["runs", "sooner", "later"]


def test_a_model_of_time_that_comes_late_changes_the_order() -> None:
    engine = Timed(time=None, max_num_seqs=1)
    engine.ask("runs", 10, 9, tpot_ms=50)
    engine.step()
    engine.ask("whenever", 10, 2)
    engine.ask("soon", 10, 2, ttft_ms=500)
    engine.step()
    engine.time = TIME
    engine.run()
    assert engine.order == ["runs", "soon", "whenever"]


def test_what_the_host_adds_to_a_step_is_learned() -> None:
    """Steps take 5 ms longer than the device says. Decodes keep their pace all the same."""
    engine = Timed()
    engine.ask("chat", 10, 100, tpot_ms=50)
    engine.step(3)
    engine.ask("long", 1500)
    while engine.core.scheduler.has_work:
        engine.step()
        engine.device.now += 0.005
    assert engine.tpot_ms("chat") <= 50
    assert_idle(engine.core)


requests = st.lists(
    st.tuples(
        st.integers(1, 40),  # tokens of the prompt
        st.integers(1, 12),  # of the answer
        st.sampled_from((None, 2_000.0, 20_000.0, 200_000.0)),  # TTFT in ms, of a clock that goes on by a second a look
        st.sampled_from((None, 1_500.0, 10_000.0)),
        st.integers(0, 6),  # steps until the next one comes
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=6, deadline=None)
@given(
    asked=requests,
    num_blocks=st.sampled_from((16, 24, 60)),
    mode=st.sampled_from(("recompute", "swap")),
    late=st.sampled_from(("refuse", "best-effort")),
    policy=st.sampled_from(("slo", "auto")),
    seed=st.integers(0, 99),
)
def test_any_mixture_gives_the_reference_answers_or_is_refused(
    asked: list[tuple[int, int, float | None, float | None, int]],
    num_blocks: int,
    mode: str,
    late: str,
    policy: str,
    seed: int,
) -> None:
    rng = random.Random(seed)
    core, _ = make_core(
        num_blocks=num_blocks,
        queue_policy=policy,
        slo_late=late,
        preemption_mode=mode,
        swap_space_gb=1e-5,
        max_num_seqs=6,
        max_num_batched_tokens=24,
        chunk_size=16,
        batch_time=linear_time(1.0, 0.2),
    )
    wanted: dict[str, list[int]] = {}
    events: list[m.Event] = []
    for number, (num_prompt, num_tokens, ttft_ms, tpot_ms, num_steps) in enumerate(asked):
        prompt = [rng.randrange(20) for _ in range(num_prompt)]
        targets = None if ttft_ms is None and tpot_ms is None else LatencyTargets(ttft_ms, tpot_ms)
        add(core, str(number), prompt, max_tokens=num_tokens, targets=targets, priority=rng.choice((0, 0, 3)))
        wanted[str(number)] = reference(prompt, num_tokens)
        for _ in range(num_steps):
            core.step()
            assert core.scheduler.check_integrity() == []
            events += core.take_events()
    events += run(core)
    refused = {event.request_id for event in events if isinstance(event, m.RequestFailed)}
    assert late == "refuse" or not refused
    assert tokens_of(events) == {name: tokens for name, tokens in wanted.items() if name not in refused}
    assert_idle(core)
