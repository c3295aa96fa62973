"""Planning by the workers' models of time: targets hold, and each loop does its part."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.oracle import best_batch
from bench.planner import run_planner, synthetic_day
from common.config import AutoscalerSettings
from common.errors import ConfigError
from common.types import WorkerRole
from router.autoscaler.model_rules import LatencyGoal, ModelRules, latency_goal
from router.autoscaler.planner import Bounds, Planner, PlannerOptions
from router.autoscaler.rules import Needs, TargetRules, Targets
from router.autoscaler.server import check, make_planner
from router.autoscaler.signals import FleetSignals, Need, RoleSignals
from simulation.rough_fleet import Hardware, Slo

HARDWARE = Hardware()
GOAL = LatencyGoal(ttft_s=10.0, tpot_s=0.035, share=0.9, startup_s=30.0)


class Fallback:
    def needs(self, _now: float, _signals: FleetSignals) -> Needs:
        return Needs(Need(1.0, "fallback"), Need(1.0, "fallback"))


def signals(now: float, rate: float = 2.0, **changes: object) -> FleetSignals:
    """`rate` requests a second since 0, of 4,000 prompt tokens and 300 of answer."""
    ready = RoleSignals(num_ready=2, times=(HARDWARE,))
    whole = FleetSignals(
        prefill=ready,
        decode=ready,
        arrived_requests=rate * now,
        arrived_tokens=4000 * rate * now,
        answered_tokens=300 * rate * now,
        arrival_tokens_per_s=4000 * rate,
    )
    return replace(whole, **changes)  # type: ignore[arg-type]


def settled(rules: ModelRules, rate: float = 2.0, seconds: int = 120) -> Needs:
    for now in range(0, seconds, 5):
        needs = rules.needs(float(now), signals(float(now), rate))
    return needs


def test_the_least_workers_that_hold_the_targets() -> None:
    """At a rate of 4, prompts keep 2 workers of 8,000 tokens/s just busy, which the target of 10 s leaves room for.
    Answers are 1,200 tokens/s, and a worker makes 571 in time."""
    few, many = settled(ModelRules(GOAL, Fallback()), 1.0), settled(ModelRules(GOAL, Fallback()), 4.0)
    assert (few.prefill.workers, few.decode.workers) == (1, 1)
    assert (many.prefill.workers, many.decode.workers) == (2, 3)
    assert many.prefill.exact
    assert "16000 prompt tokens/s in 30 s, 8000 per worker" in many.prefill.reason
    assert "4.00 requests/s of 300 tokens, 20 requests per worker in time" in many.decode.reason


def test_plenty_of_workers_are_those_that_half_the_share_of_late_requests_asks_for() -> None:
    needs = settled(ModelRules(GOAL, Fallback()), 8.0)
    stricter = settled(ModelRules(replace(GOAL, share=0.95), Fallback()), 8.0)
    assert (needs.prefill.plenty, needs.decode.plenty) == (stricter.prefill.workers, stricter.decode.workers)
    assert needs.decode.plenty == needs.decode.workers + 1


def test_a_higher_share_asks_for_more() -> None:
    shares = [settled(ModelRules(replace(GOAL, share=share), Fallback()), 9.0) for share in (0.5, 0.999)]
    assert shares[0].prefill.workers < shares[1].prefill.workers


def test_a_queue_asks_for_more_than_the_forecast() -> None:
    rules = ModelRules(GOAL, Fallback())
    before = settled(rules)
    queued = replace(signals(120.0).prefill, queued_tokens=600_000, num_requests=150)
    after = rules.needs(120.0, signals(120.0, prefill=queued))
    assert after.prefill.workers > before.prefill.workers
    assert "and 600000 queued" in after.prefill.reason


def test_requests_that_stay_ask_for_more_than_the_forecast() -> None:
    """Answers become long, and none of them has ended yet."""
    rules = ModelRules(GOAL, Fallback())
    settled(rules)
    for now in range(120, 300, 2):
        full = replace(signals(0.0).decode, num_requests=90)
        needs = rules.needs(float(now), signals(float(now), decode=full))
        assert needs.decode.workers <= 5
        if now == 122:
            assert needs.decode.workers < 3, "a second is no reason to start a worker"
    assert needs.decode.workers == 5
    assert "4.4" in needs.decode.reason


def test_kv_that_is_used_limits_the_requests_of_a_worker() -> None:
    rules = ModelRules(GOAL, Fallback())
    for now in range(0, 200, 5):
        used = replace(signals(0.0).decode, num_requests=16, kv_used=3.2)
        needs = rules.needs(float(now), signals(float(now), decode=used))
    assert needs.decode.workers >= 5, "3.2 workers' KV at 0.7 each"


def test_without_models_of_time_the_other_rules_decide() -> None:
    rules = ModelRules(GOAL, Fallback())
    unknown = RoleSignals(num_ready=3)
    for now in range(0, 120, 5):
        needs = rules.needs(float(now), signals(float(now), prefill=unknown, decode=unknown))
    assert needs.prefill.reason == "fallback"


def test_a_new_autoscaler_takes_nobody_away() -> None:
    rules = ModelRules(GOAL, Fallback())
    three = RoleSignals(num_ready=2, num_silent=1, times=(HARDWARE,))
    needs = rules.needs(0.0, signals(0.0, prefill=three, decode=three))
    assert (needs.prefill.workers, needs.decode.workers) == (3, 3)
    for now in range(5, 100, 5):  # and nothing arrives at all
        needs = rules.needs(float(now), signals(float(now), 0.0, prefill=three, decode=three))
    assert needs.prefill.reason == "fallback"


def test_silent_routers_change_nothing_for_a_while() -> None:
    rules = ModelRules(GOAL, Fallback())
    before = settled(rules, 4.0)
    silence = FleetSignals(prefill=signals(0).prefill, decode=signals(0).decode)
    kept = rules.needs(130.0, silence)
    assert kept.prefill.workers == before.prefill.workers
    assert kept.prefill.reason.startswith("routers are silent")
    assert rules.needs(1000.0, silence).prefill.reason == "fallback"


def test_no_tolerance_applies_to_the_least_number() -> None:
    class Eleven:
        def needs(self, _now: float, _signals: FleetSignals) -> Needs:
            return Needs(Need(10.5, "x", exact=True), Need(10.5, "x"))

    bounds = Bounds(1, 20)
    planner = Planner(PlannerOptions(prefill=bounds, decode=bounds, scale_up_delay_s=0), Eleven())
    for role in (WorkerRole.PREFILL, WorkerRole.DECODE):
        planner.adopt(0.0, role, 10)
    decided = planner.step(1.0, signals(1.0))
    assert decided[WorkerRole.PREFILL].desired == 11
    assert decided[WorkerRole.DECODE].desired == 10, "within a tenth of ten"


def test_a_day_keeps_the_stated_share_with_fewer_workers_than_by_signals() -> None:
    """The comparison that bench/planner.py prints, without its oracle: decisions must not get worse unnoticed."""
    jobs, slo = synthetic_day(seconds=900.0), Slo()
    targets = Targets(queued_tokens=40_000, prefill_rate=6400.0, requests=best_batch(HARDWARE, slo) * 0.8)
    bounds = Bounds(1, 64)
    by_signals = run_planner(jobs, HARDWARE, slo, PlannerOptions(prefill=bounds, decode=bounds), TargetRules(targets))
    options = PlannerOptions(prefill=bounds, decode=bounds, scale_down_delay_s=HARDWARE.startup_s)
    rules = ModelRules(GOAL, TargetRules(targets))
    by_model = run_planner(jobs, HARDWARE, slo, options, rules, learns=True)
    assert by_model.slo_ok > GOAL.share
    assert by_model.hours < by_signals.hours


def settings(**values: object) -> AutoscalerSettings:
    return AutoscalerSettings.model_validate({"routers": "localhost:1", **values})


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"planner": "model", "target_tpot_ms": 35}, "target_ttft_ms: is needed by --planner model"),
        ({"planner": "advisory", "target_ttft_ms": 35}, "target_tpot_ms: is needed by --planner advisory"),
        ({"target_ttft_ms": 35}, "target_ttft_ms: means nothing"),
        (
            {"planner": "model", "target_ttft_ms": 1, "target_tpot_ms": 1, "routers": ""},
            "routers: are needed by --planner model",
        ),
    ],
)
def test_a_missing_target_is_named(values: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check(settings(**values))
    assert raised.value.message.startswith(reason)


def test_who_decides_and_who_advises() -> None:
    targets = {"target_ttft_ms": 1000, "target_tpot_ms": 50}
    assert make_planner(settings())[1] is None
    assert make_planner(settings(planner="model", **targets))[1] is None
    planner, adviser, _ = make_planner(settings(planner="advisory", **targets))
    assert adviser is not None
    for now in range(0, 120, 5):
        loaded = signals(float(now), 9.0)
        decided, advised = planner.step(float(now), loaded), adviser.step(float(now), loaded)
    assert "later than" not in decided[WorkerRole.PREFILL].reasons[0]
    assert "later than 1 s" in advised[WorkerRole.PREFILL].reasons[0]


def test_a_goal_is_in_seconds() -> None:
    goal = latency_goal("model", 1500.0, 40.0, share=0.99, startup_s=60.0, kv_usage=0.5)
    assert goal == LatencyGoal(ttft_s=1.5, tpot_s=0.04, share=0.99, startup_s=60.0, kv_usage=0.5)
    assert latency_goal("signals", None, None, share=0.9, startup_s=1.0, kv_usage=0.5) is None
