"""Which worker's role should change: decisions that are pure, and orders of a real process."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.config import AutoscalerSettings
from common.errors import ConfigError
from common.types import WorkerRole
from protos.baton.v1 import worker_pb2
from protos.keda import externalscaler_pb2 as keda_pb2
from router.autoscaler.planner import Bounds, Planner, PlannerOptions
from router.autoscaler.roles import RoleOptions, RolePlanner, Shift
from router.autoscaler.server import check
from router.autoscaler.signals import FleetSignals, MovableWorker, Need, RoleSignals, ScaleDecision
from tests.examples import examples
from tests.router.autoscaler.test_planner import FixedRules
from tests.router.autoscaler.test_process import StartLoaded, autoscaler, start_loaded, trigger  # noqa: F401

PREFILL, DECODE, BOTH = WorkerRole.PREFILL, WorkerRole.DECODE, WorkerRole.BOTH
LETTERS = {"P": PREFILL, "D": DECODE, "B": BOTH}


def movable(letters: str) -> list[MovableWorker]:
    """`PDB!`: workers w1, w2, ... by what they take; `!` pins the one before."""
    found: list[MovableWorker] = []
    for letter in letters:
        if letter == "!":
            found[-1] = replace(found[-1], is_pinned=True)
        else:
            found.append(MovableWorker(address=f"w{len(found) + 1}", role=LETTERS[letter]))
    return found


def signals(workers: list[MovableWorker], prefill: int = 0, decode: int = 0) -> FleetSignals:
    """`prefill`, `decode`: workers of one role."""
    takes = [one.role for one in workers]
    return FleetSignals(
        prefill=RoleSignals(num_ready=prefill + len(takes) - takes.count(DECODE), num_fixed=prefill),
        decode=RoleSignals(num_ready=decode + len(takes) - takes.count(PREFILL), num_fixed=decode),
        both=RoleSignals(num_ready=len(takes)),
    )


def needs(prefill: float, decode: float) -> dict[WorkerRole, ScaleDecision]:
    return {
        role: ScaleDecision(role=role, desired=1, previous=1, needed=needed, reasons=())
        for role, needed in ((PREFILL, prefill), (DECODE, decode))
    }


def best(letters: str, prefill: float, decode: float, fixed: tuple[int, int] = (0, 0)) -> Shift | None:
    planner, workers = RolePlanner(RoleOptions(delay_s=0.0)), movable(letters)
    return planner.step(0.0, needs(prefill, decode), signals(workers, *fixed), workers)


@pytest.mark.parametrize(
    ("letters", "prefill", "decode", "wanted"),
    [
        ("PDDD", 2, 1, "w2 decode -> prefill"),
        ("PDDD", 1, 3, ""),  # nobody is short
        ("PPPD", 1, 3, "w1 prefill -> decode"),
        ("PDDD", 1.05, 3, ""),  # what it would take away is less than a tenth
        ("PD", 3, 0.4, "w2 decode -> both"),  # one that takes requests has to stay
        ("PD", 0.4, 3, "w1 prefill -> both"),
        ("BB", 1.2, 0.4, ""),  # who is short has the time of both
        ("BB", 3, 0.4, ""),  # and nobody else could give it more
        ("BB", 1.0, 0.9, ""),  # what workers of one kind would gain is less than a tenth
        ("PPD", 0.3, 2.1, "w1 prefill -> decode"),
        ("PDD", 1.7, 1.7, "w2 decode -> both"),
        ("BD", 0.2, 1.9, ""),  # so does one that takes prompts
        ("PD!D", 2, 1, "w3 decode -> prefill"),
        ("PD!D!", 2, 1, ""),
        ("P!D!B!", 9, 1, ""),
        ("D", 2, 1, "w1 decode -> both"),
        ("", 2, 1, ""),
    ],
)
def test_the_best_shift(letters: str, prefill: float, decode: float, wanted: str) -> None:
    shift = best(letters, prefill, decode)
    assert ("" if shift is None else f"{shift.worker.address} {shift.words}") == wanted


def test_a_reason_is_in_numbers_and_workers_of_one_role_count() -> None:
    shift = best("DD", 3, 1, fixed=(1, 1))
    assert shift is not None
    assert shift.reason == (
        "prefill needs 3.00 workers and decode 1.00: 2 prefill, 2 decode, 0 both instead of 1 prefill, 3 decode, 0 both"
    )


def test_the_worker_with_least_to_do_goes() -> None:
    workers = [replace(one, num_requests=number) for one, number in zip(movable("PDDD"), (0, 5, 2, 7), strict=True)]
    shift = RolePlanner(RoleOptions(delay_s=0.0)).step(0.0, needs(2, 1), signals(workers), workers)
    assert shift is not None
    assert shift.worker.address == "w3"


def test_a_need_has_to_last_and_shifts_are_apart() -> None:
    planner, workers = RolePlanner(RoleOptions(delay_s=3.0, interval_s=30.0)), movable("PDDDD")
    seen = signals(workers)
    assert planner.step(0.0, needs(2, 1), seen, workers) is None
    assert planner.step(2.0, needs(1, 1), seen, workers) is None  # it was short for a moment
    assert planner.step(3.0, needs(2, 1), seen, workers) is None
    assert planner.step(6.0, needs(2, 1), seen, workers) is not None
    # It is not known yet whether that was done: nothing is decided meanwhile.
    for second in range(7, 36):
        assert planner.step(float(second), needs(3, 1), seen, workers) is None
    assert planner.step(36.0, needs(3, 1), seen, workers) is not None
    planner.adopt(70.0)  # another process decided until now
    assert planner.step(99.0, needs(3, 1), seen, workers) is None
    assert planner.step(102.0, needs(3, 1), seen, workers) is not None


needed = st.floats(0, 20, allow_nan=False)


@settings(max_examples=examples(60), deadline=None)
@given(
    st.text("PDB", min_size=1, max_size=8),
    st.lists(st.tuples(needed, needed), min_size=1, max_size=20),
    st.integers(0, 2),
    st.integers(0, 2),
)
def test_shifts_settle_and_leave_a_worker_for_each_role(
    letters: str, wanted: list[tuple[float, float]], prefill: int, decode: int
) -> None:
    planner, workers = RolePlanner(RoleOptions(delay_s=0.0, interval_s=1.0)), movable(letters)
    now = 0.0
    for prefill_need, decode_need in wanted:
        for _ in range(3 * len(workers) + 1):  # with the same needs
            now += 1.0
            takes = [one.role for one in workers]
            had_all = prefill + len(takes) - takes.count(DECODE) and decode + len(takes) - takes.count(PREFILL)
            seen = signals(workers, prefill=prefill, decode=decode)
            shift = planner.step(now, needs(prefill_need, decode_need), seen, workers)
            if shift is None:
                break
            workers[workers.index(shift.worker)] = replace(shift.worker, role=shift.role)
            takes = [one.role for one in workers]
            has_all = prefill + len(takes) - takes.count(DECODE) and decode + len(takes) - takes.count(PREFILL)
            assert has_all or not had_all
        else:
            pytest.fail("roles go round and round")


def test_pods_are_asked_for_by_what_the_whole_fleet_needs() -> None:
    rules = FixedRules()
    options = PlannerOptions(both=Bounds(2, 9), scale_up_delay_s=0.0, scale_down_delay_s=0.0)
    planner = Planner(options, rules)
    workers, seconds = movable("PPD"), itertools.count()

    def desired(prefill: float, decode: float) -> int:
        rules.prefill, rules.decode = Need(prefill, "x", exact=True), Need(decode, "y", exact=True)
        return planner.step(next(seconds), signals(workers, decode=1))[BOTH].desired

    assert desired(1, 3) == 3  # four in all: a role moves
    assert desired(2, 4) == 5
    assert desired(0, 1) == 2
    assert desired(20, 20) == 9
    assert (
        "roles move, less 0 and 1 of one role"
        in planner.step(next(seconds), signals(workers, decode=1))[BOTH].reasons[0]
    )


@pytest.mark.parametrize(
    ("fixed", "prefill", "decode", "wanted"),
    [
        ((4, 0), 0.2, 5, 5),  # four idle prefill workers decode nothing
        ((0, 4), 3, 0.5, 3),
        ((1, 2), 3, 4, 4),
        ((4, 4), 1, 1, 0),
    ],
)
def test_workers_of_one_role_do_no_work_of_the_other(
    fixed: tuple[int, int], prefill: float, decode: float, wanted: int
) -> None:
    rules = FixedRules()
    rules.prefill, rules.decode = Need(prefill, "x", exact=True), Need(decode, "y", exact=True)
    planner = Planner(PlannerOptions(both=Bounds(0, 9), scale_up_delay_s=0.0, idle_timeout_s=0.0), rules)
    assert planner.step(0.0, signals([], *fixed))[BOTH].desired == wanted


def test_what_is_wrong_with_settings_is_named() -> None:
    for fields, name in (
        ({"both_workload": "deployment/x"}, "both_workload"),
        ({"move_roles": True, "apply": True}, "both_workload"),
        ({"both_min": 5, "both_max": 4}, "both_min"),
    ):
        with pytest.raises(ConfigError) as raised:
            check(AutoscalerSettings.model_validate(fields))
        assert raised.value.message.startswith(name)


async def test_the_process_moves_a_role_and_says_why(start_loaded: StartLoaded) -> None:  # noqa: F811
    workers = [await start_loaded(BOTH) for _ in range(3)]
    for worker, role in zip(workers, (1, 2, 2), strict=True):
        worker.take(worker_pb2.WorkerRole.ValueType(role))
    addresses = tuple(worker.address for worker in workers)
    first, *others = workers
    async with autoscaler(
        prefill=addresses,
        decode=addresses,
        target_queued_tokens=100,
        move_roles=True,
        role_delay=0,
        role_interval=1,
        both_max=6,
    ) as running:
        found = await running.until(lambda d: d["decisions"]["prefill"]["workers"] == 1)
        assert found["decisions"]["decode"]["workers"] == 2
        assert found["decisions"]["both"]["workers"] == 3
        first.change(load={**first.load, "num_queued_prompt_tokens": 200})
        found = await running.until(lambda d: d["roles"]["shifts"])
        (shift,) = found["roles"]["shifts"]
        assert (shift["roles"], shift["failure"]) == ("decode -> prefill", "")
        assert shift["reason"].startswith(
            "prefill needs 2.00 workers and decode 0.00: 2 prefill, 1 decode, 0 both instead of"
        )
        (moved,) = [one for one in others if one.orders]
        assert moved.address == shift["address"]
        (order,) = moved.orders
        assert order == worker_pb2.SetWorkerRoleRequest(
            role=worker_pb2.WORKER_ROLE_PREFILL, epoch="e1", num_role_shifts=0, reason=shift["reason"]
        )
        await running.until(lambda d: d["decisions"]["prefill"]["workers"] == 2)
        # Two take prompts now: the fleet as a whole is short only if its needs are more than three.
        first.change(load={**first.load, "num_queued_prompt_tokens": 450})
        found = await running.until(lambda d: d["decisions"]["both"]["desired"] == 5)
        request = keda_pb2.GetMetricsRequest(scaledObjectRef=trigger("both"), metricName="desired_replicas")
        assert (await running.keda.GetMetrics(request)).metricValues[0].metricValueFloat == 5
        _, text = await running.get("/metrics")
        assert 'baton_desired_replicas{role="both"} 5.0' in text
        assert 'baton_autoscaler_role_shifts_total{role="prefill"} 1.0' in text
