"""A worker that dies or hangs while a decode worker's blocks are lent to a prefill worker: the answer stays the same,
and whoever lives is free of the loan afterwards (`settled`)."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from baton.client.report import Result
from tests.chaos.tiny_model import random_prompt, reference_answer
from tests.faults import watch
from tests.faults.harm import revive
from tests.integration.ask import Salt
from tests.integration.stack import CALL_TIMEOUT_S, Fleet, Member, running, wait_for
from tests.integration.tiny import tiny_fleet
from tests.nixl import needs_nixl

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow, needs_nixl]

NUM_PROMPT, NUM_ANSWER, NUM_NEW = 200, 100, 50


@dataclass(slots=True, frozen=True)
class Place:
    fleet: Fleet
    model: LlamaForCausalLM


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder: Path = tmp_path_factory.mktemp("fleet")
    flags = ("--connector=nixl", "--engine-timeout=30", "--transfer-timeout-s=10")
    # The second turn comes to the decode worker that has the first one.
    fleet = tiny_fleet(folder, *flags, prefill=2, decode=2, router_flags=("--policy=session",))
    with running(fleet):
        yield Place(fleet, LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval())


def send(pids: Iterable[int], signum: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, signum)


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP], ids=lambda fault: fault.name)
@pytest.mark.parametrize("who", ["prefill", "decode"])
@pytest.mark.parametrize("moment", ["asked for", "lent"])
def test_a_loan_in_which_one_end_is_lost(
    place: Place, salt: Salt, moment: str, who: str, fault: signal.Signals
) -> None:
    fleet, draw, one_salt = place.fleet, random.Random(f"{moment} {who} {fault}"), salt()
    with fleet.client() as client, ThreadPoolExecutor(1) as pool:

        def ask(prompt: list[int], num_tokens: int) -> Result:
            call = client.generate(
                prompt, temperature=0.0, max_tokens=num_tokens, cache_salt=one_salt, session=one_salt
            )
            return call.result()

        prompt = random_prompt(draw, NUM_PROMPT)
        prompt = [*prompt, *ask(prompt, NUM_ANSWER).token_ids, *random_prompt(draw, NUM_NEW)]
        held = {watch.engine_pid(member) for member in fleet.members if member.role == "prefill"}
        send(held, signal.SIGSTOP)
        try:
            future = pool.submit(ask, prompt, NUM_ANSWER)
            prefill, decode = _workers(fleet)
            wait_for("the decode worker waits for KV", lambda: watch.load(decode).num_running == 1)
            before = _num_lent(prefill)
            lender, borrower = watch.engine_pid(decode), watch.engine_pid(prefill)
            send([lender], signal.SIGSTOP)
            send(held, signal.SIGCONT)
            held = {lender}
            wait_for("the prefill worker waits for the loan", lambda: watch.load(prefill).num_running == 1)
            if moment == "lent":
                send([borrower], signal.SIGSTOP)
                send([lender], signal.SIGCONT)
                held = {borrower}
                watch.status(decode)  # the engine has taken in all that came before
            assert _num_lent(prefill) == before, "the loan is over"
            victim = prefill if who == "prefill" else decode
            pids = victim.pids
            send(pids, fault)
            send(held - pids, signal.SIGCONT)
            held = set()
            result = future.result(CALL_TIMEOUT_S)
        finally:
            send(held, signal.SIGCONT)
        if fault is signal.SIGSTOP:
            send(pids, signal.SIGCONT)
    revive(fleet, may_end=True)
    wanted = reference_answer(place.model, prompt, NUM_ANSWER, temperature=0.0, seed=0)
    assert len(wanted) > NUM_ANSWER // 2  # the rest, if any, follows a tie
    assert list(result.token_ids)[: len(wanted)] == wanted
    assert result.report.num_retries >= 1
    assert victim.address not in (result.report.prefill_worker, result.report.decode_worker)
    assert result.report.num_blocks_lent == 0 or who == "prefill"  # which had not asked yet, so that another one may


def _workers(fleet: Fleet) -> tuple[Member, Member]:
    """The prefill and the decode worker of the one request that runs."""
    wait_for("the router has sent the request", lambda: len(watch.places(fleet.http)) == 2)
    found = {member.role: member for member in map(fleet.member, watch.places(fleet.http))}
    return found["prefill"], found["decode"]


def _num_lent(prefill: Member) -> float:
    """Blocks of loans that the worker has read, or given up."""
    return watch.total(watch.worker_metrics(prefill), "baton_worker_kv_blocks_lent_total")
