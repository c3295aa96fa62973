"""A simulated fleet answers as one simulated device does: over connectors, from prefixes, and after a kill."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.client.report import Result
from common.batch_time import StepShape
from common.errors import OverloadedError
from common.targets import LatencyTargets
from engine.simulated.data_sheet import simulated_time
from tests.chaos.tiny_model import random_prompt
from tests.integration.simulated import simulated_answer
from tests.integration.stack import Fleet, kill, running
from tests.integration.tiny import tiny_fleet
from tests.nixl import skip_without_nixl

NUM_TOKENS = 24


def start(folder: Path, connector: str, prefill: int, decode: int, *more: str) -> Fleet:
    flags = (
        "--device=simulated",
        "--simulated-time=xeon-135m",
        f"--connector={connector}",
        "--max-model-len=2048",
        *more,
    )
    return tiny_fleet(folder, *flags, prefill=prefill, decode=decode, router_flags=("--min-remote-tokens=1",))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fleet")


@pytest.fixture(scope="module")
def fleet(folder: Path) -> Iterator[Fleet]:
    """One prefill and two decode workers, of which one may be killed."""
    fleet = start(folder, "shared_storage", 1, 2, "--slo-late=refuse")
    with running(fleet):
        yield fleet


def reference(folder: Path, prompt: list[int]) -> list[int]:
    return simulated_answer(folder / "model", prompt, NUM_TOKENS)


@pytest.mark.parametrize("connector", ["shared_storage", "nixl"])
def test_answers_are_those_of_one_device(tmp_path: Path, connector: str) -> None:
    skip_without_nixl(connector)
    prompts = [random_prompt(random.Random(number), 40 + 37 * number) for number in range(6)]
    prompts += [[*prompt, 7, 8, 9] for prompt in prompts]
    fleet = start(tmp_path, connector, 2, 2)
    with running(fleet), fleet.client() as client:

        def ask(prompt: list[int]) -> tuple[list[int], int]:
            answer = client.generate(prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True).result()
            assert not answer.report.fallback_reason
            return list(answer.token_ids), answer.report.num_blocks_moved

        expected = [reference(tmp_path, prompt) for prompt in prompts]
        moved = 0
        for _ in range(2):
            with ThreadPoolExecutor(6) as pool:
                answers = list(pool.map(ask, prompts))
            assert [tokens for tokens, _ in answers] == expected
            moved += sum(num_blocks for _, num_blocks in answers)
        assert moved
        fleet.settle()


def test_a_killed_worker_s_answer_goes_on_elsewhere(folder: Path, fleet: Fleet) -> None:
    prompt = random_prompt(random.Random(3), 100)
    expected = reference(folder, prompt)
    with fleet.client() as client:
        answer = client.generate(prompt, max_tokens=400, temperature=0.0, ignore_eos=True)
        next(iter(answer))
        victim = fleet.busy("decode")
        kill(victim.process)
        result = answer.result()
    fleet.replace(victim)
    assert list(result.token_ids)[:NUM_TOKENS] == expected
    assert result.report.num_migrations == 1


def test_workers_refuse_who_cannot_meet_its_latency_targets(folder: Path, fleet: Fleet) -> None:
    """A decode worker at once, or after a prefill worker: if that does not compute the prompt in time, neither does
    the decode worker."""
    prompt = random_prompt(random.Random(6), 900)
    size = len(prompt)
    alone_s = simulated_time("xeon-135m").time.seconds(
        StepShape(num_chunks=1, chunk_tokens=size, chunk_pairs=size * size // 2, chunk_squares=size * size)
    )
    with fleet.client() as client:

        def ask(ttft_ms: float, request_id: str) -> Result:
            targets = LatencyTargets(ttft_ms=ttft_ms, tpot_ms=10_000)
            return client.generate(
                prompt, max_tokens=NUM_TOKENS, temperature=0.0, ignore_eos=True, slo=targets, request_id=request_id
            ).result()

        for ttft_ms, request_id in ((1, "hopeless"), (900 * alone_s, "late")):
            words = "latency targets cannot be met here any more: its first token takes"
            with pytest.raises(OverloadedError, match=words):
                ask(ttft_ms, request_id)
        assert list(ask(3_600_000, "in-time").token_ids) == reference(folder, prompt)
    lines = [line for line in fleet.logs().splitlines() if "cannot meet its latency targets" in line]
    assert all("hopeless" in line or "request_id=late" in line for line in lines)
    assert len(lines) >= 2


def test_a_fleet_is_as_fast_as_its_model_says(fleet: Fleet) -> None:
    """Not faster; how much slower it is depends on this machine."""
    prompt = random_prompt(random.Random(5), 64)
    decode = StepShape(num_decodes=1, decode_context=64, longest_context=64, num_head_rows=1)
    with fleet.client() as client:
        begin = time.monotonic()
        client.generate(prompt, max_tokens=40, temperature=0.0, ignore_eos=True).result()
        assert time.monotonic() - begin > 39 * simulated_time("xeon-135m").time.seconds(decode)
