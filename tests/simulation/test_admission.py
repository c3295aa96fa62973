"""The router's queue, limits and hedges in simulations: the real ones, on a virtual clock."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from common.config import SimulateSettings
from common.errors import ConfigError, OverloadedError, StartupError
from common.traffic.requests import TrafficRequest
from simulation.admission import AdmissionOptions, SimulatedAdmission
from simulation.clock import VirtualClock
from simulation.scenario import Result, run, with_tenants

BUSY: dict[str, object] = {
    "prefill": 0,
    "decode": 0,
    "both": 1,
    "rate": 100.0,
    "requests": 60,
    "prompt_tokens": 200,
    "output_tokens": 20,
    "block_size": 64,
    "leap": True,
    "max_running": 2,
    "tenants": "batch=9,web=1",
    "seed": 5,
}


@cache
def played(**settings: object) -> Result:
    (result,) = run(SimulateSettings.model_validate({**BUSY, **settings}))
    return result


def by_tenant(**settings: object) -> dict[str, dict[str, float]]:
    return played(**settings).outcome.by_tenant({})


def test_a_tenant_waits_behind_its_own_backlog_alone() -> None:
    batch, web = by_tenant()["batch"], by_tenant()["web"]
    assert batch["requests"] > 4 * web["requests"] > 0
    assert web["p99_queue_ms"] < batch["p50_queue_ms"] / 4
    assert played().figures["failed"] == 0
    assert played().figures["mean_queue_ms"] > 0
    without = played(max_running=None)
    assert "mean_queue_ms" not in without.figures


def test_leaps_keep_turns_and_equal_seeds_are_equal() -> None:
    leaps, exact = played(), played(leap=False)
    again = run(SimulateSettings.model_validate(BUSY))[0]
    assert again.figures == leaps.figures
    for one, other in zip(exact.outcome.requests, leaps.outcome.requests, strict=True):
        assert other.queue_s == pytest.approx(one.queue_s, rel=0.01)
        assert other.e2e_s == pytest.approx(one.e2e_s, rel=0.01)


def test_weights_and_priorities_are_those_of_the_limits_file(tmp_path: Path) -> None:
    limits = tmp_path / "limits.yaml"
    limits.write_text("tenants: {batch: {weight: 100}}")
    weighted = by_tenant(limits_file=str(limits), tenants="batch=1,web=1")
    assert weighted["batch"]["p99_queue_ms"] < weighted["web"]["p99_queue_ms"] / 1.5
    urgent = tmp_path / "urgent.yaml"
    urgent.write_text("tenants: {web: {priority: 1}}")
    first = by_tenant(limits_file=str(urgent), tenants="batch=1,web=1")
    assert first["web"]["p99_queue_ms"] < first["batch"]["p99_queue_ms"] / 1.5


def test_who_would_wait_too_long_is_refused() -> None:
    result = played(max_queue_wait=0.2)
    reasons = result.outcome.failures()
    assert {reason.partition(": ")[0] for reason in reasons} == {"the router is busy"}
    assert 0 < sum(reasons.values()) == result.figures["failed"] < 60
    assert max(one.queue_s for one in result.outcome.requests) <= 0.2
    full = played(max_queued=3).outcome.failures()
    assert "the router is busy: N requests wait already" in full


def test_limits_of_a_tenant_refuse_its_own_requests(tmp_path: Path) -> None:
    limits = tmp_path / "limits.yaml"
    limits.write_text("tenants: {batch: {requests_per_second: 4}}")
    tenants = by_tenant(max_running=None, limits_file=str(limits))
    assert tenants["web"]["failed"] == 0
    # A burst of two seconds' worth, and then four a second for the 0.6 s of the traffic.
    assert tenants["batch"]["requests"] - tenants["batch"]["failed"] == 10
    few = played(max_running=None, max_requests=8)
    assert list(few.outcome.failures()) == ["this key has N requests in flight, the most for one; try again later"]


def test_tokens_of_a_prompt_that_nobody_computes_are_given_back(tmp_path: Path) -> None:
    limits = tmp_path / "limits.yaml"
    limits.write_text("default: {tokens_per_second: 50, streams: 2}")
    clock, begun, refused = VirtualClock(), [], []
    options = AdmissionOptions(max_running=1, max_queue_wait_s=1.0, limits_file=str(limits))
    admission = SimulatedAdmission(options, clock)

    def come(name: str) -> object:
        return admission.admit("", 50, 1, lambda: begun.append(name), lambda error: refused.append((name, str(error))))

    first = come("first")
    come("second")  # both are computed from a burst of 100
    with pytest.raises(OverloadedError, match="2 answers in flight"):
        come("third")
    while clock.step():
        pass
    assert (begun, [name for name, _ in refused]) == (["first"], ["second"])
    assert "waited 1 s" in refused[0][1]
    assert clock.now == 1.0
    come("fourth")  # 50 were left, 50 came and 50 were given back
    admission.end(first)  # type: ignore[arg-type]
    clock.step()
    assert begun == ["first", "fourth"]


def test_latency_targets_of_the_limits_file_reach_the_workers(tmp_path: Path) -> None:
    limits = tmp_path / "limits.yaml"
    limits.write_text(
        "slo_classes: {chat: {ttft_ms: 1, tpot_ms: 1}, offline: {}}\n"
        "tenants: {web: {slo_class: chat}, batch: {slo_class: offline}}"
    )
    result = played(max_running=None, limits_file=str(limits), queue_policy="slo", slo_late="refuse")
    assert {one.tenant for one in result.outcome.requests if one.was_late} == {"web"}
    assert all(one.failure for one in result.outcome.requests if one.tenant == "web")


def test_all_turns_of_a_conversation_are_one_tenants() -> None:
    settings = SimulateSettings.model_validate({"tenants": "a=1,b"})
    requests = [TrafficRequest(at=0.0, runs=((1, 8),), num_output_tokens=1, session=f"s{num % 9}") for num in range(90)]
    drawn = with_tenants(requests, settings)
    assert {one.tenant for one in drawn} == {"a", "b"}
    assert len({(one.session, one.tenant) for one in drawn}) == 9


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tenants": "web=0"}, "tenants: 'web=0' is not a name and a share above 0"),
        ({"tenants": "=2"}, "tenants: '=2' is not a name"),
        ({"tenants": "a=1,a=2"}, "tenants: a is given twice"),
        ({"max_requests_per_key": 3}, "max_requests_per_key: means nothing without --max-requests"),
        ({"limits_file": "/nowhere.yaml"}, "limits_file: "),
    ],
)
def test_what_is_wrong_is_named(settings: dict[str, object], reason: str) -> None:
    with pytest.raises((ConfigError, StartupError)) as raised:
        run(SimulateSettings.model_validate(settings))
    assert raised.value.message.startswith(reason)
