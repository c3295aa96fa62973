"""Orders of an operator to a stack that serves."""

from __future__ import annotations

import json

import pytest

from baton.client.admin import Target
from common.errors import AbortedError, UnavailableError
from common.types import WorkerRole, WorkerState
from tests.integration.ask import Salt
from tests.integration.reference import Expected
from tests.integration.stack import Stack, baton, wait_for
from tests.integration.stock_tools import grpcurl, output

pytestmark = pytest.mark.timeout(600)

ALL = Target(all_workers=True)
LONG = {"temperature": 0.0, "ignore_eos": True}


def test_orders_to_a_stack_that_serves(two: Stack, expected: dict[str, Expected], salt: Salt) -> None:
    address = {worker.role: worker.address for worker in two.workers()}
    case = expected["capital"]

    def wait_until(role: WorkerRole, state: WorkerState) -> None:
        with two.client() as client:
            wait_for(
                f"{role} is {state}",
                lambda: next(one.state for one in client.admin.state().workers if one.role is role) is state,
            )

    with two.client() as client:
        orders = client.admin

        def answer() -> list[int]:
            asked = client.generate(case.prompt_token_ids, temperature=0.0, max_tokens=16, cache_salt=salt())
            return list(asked.result().token_ids)

        running = client.generate("Once upon a time", cache_salt=salt(), max_tokens=300, **LONG)  # type: ignore[arg-type]
        next(iter(running))
        (paused,) = orders.pause(Target(worker=address[WorkerRole.DECODE]))
        assert paused.num_running <= 1
        wait_until(WorkerRole.DECODE, WorkerState.PAUSED)
        with pytest.raises(UnavailableError, match="paused"):
            answer()
        assert len(running.result().token_ids) == 300
        orders.resume(ALL)
        wait_until(WorkerRole.DECODE, WorkerState.READY)

        orders.pause(Target(worker=address[WorkerRole.PREFILL]))
        wait_until(WorkerRole.PREFILL, WorkerState.PAUSED)
        assert answer() == case.output_token_ids  # the decode worker computes the prompt
        orders.resume(ALL)
        wait_until(WorkerRole.PREFILL, WorkerState.READY)
        assert answer() == case.output_token_ids

        two.settle()
        flushed = orders.flush_cache(ALL)
        assert [one.error for one in flushed] == ["", ""]
        assert sum(one.num_device_blocks for one in flushed) > 0
        assert [worker.num_cached_blocks for worker in two.workers()] == [0, 0]

        held = client.generate("Once upon a time", cache_salt=salt(), request_id="held", max_tokens=8000, **LONG)  # type: ignore[arg-type]
        next(iter(held))
        assert orders.abort("held").num_requests == 1
        with pytest.raises(AbortedError):
            held.result()
    output(*baton("admin", "log-level", "debug", "--all", f"--router={two.grpc}"))
    output(*baton("admin", "log-level", "info", "--all", f"--router={two.grpc}"))

    def log() -> str:
        return two.process.log.read_text()

    # The router, and of each worker its front and its engine.
    wait_for("all processes say their level", lambda: log().count("another log level least_severe=info") == 5)
    assert log().count("order call=baton.v1.AdminService.Pause") == 2
    assert "aborts=held" in log()


def test_stock_tools_give_orders(two: Stack) -> None:
    (state,) = grpcurl(two.grpc, "baton.v1.AdminService/GetState", {})
    assert {one["role"] for one in state["workers"]} == {"WORKER_ROLE_PREFILL", "WORKER_ROLE_DECODE"}
    told = json.loads(output(*baton("admin", "state", "--json", f"--router={two.grpc}")))
    assert {one["address"] for one in told["workers"]} == {one["address"] for one in state["workers"]}
