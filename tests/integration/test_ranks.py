"""Workers whose model several processes compute: the same answers, whatever the other side's number of ranks is, and
without those of their processes that are killed."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.client.sync_client import Answer
from tests.engine.tiny_models import FAMILIES, VOCAB_SIZE, make_model
from tests.integration.ask import Salt, ask, check
from tests.integration.prompts import BY_NAME, Case
from tests.integration.reference import Expected
from tests.integration.stack import CALL_TIMEOUT_S, Fleet, Member, ranks_of, running, wait_for
from tests.integration.test_killed_workers import num_files
from tests.integration.test_quantized_models import greedy
from tests.nixl import needs_nixl
from tests.router.tiny_tokenizer import endless_tokenizer_files

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

NUM_RANKS = 3  # the embedded model has 9 heads, and 3 for K and V

Answers = dict[str, Expected]


class RankedFleet(Fleet):
    """One prefill worker and further decode workers, each with its own number of ranks, or of stages and of ranks of
    each stage."""

    def __init__(
        self,
        folder: Path,
        connector: str,
        num_ranks: Sequence[int | tuple[int, int]],
        *flags: str,
        dealt: str = "",
    ) -> None:
        """`dealt`: what ranks have whole, `experts`, or `requests`, too."""
        self._num_ranks, self._dealt = list(num_ranks), dealt
        self._ranks_at: dict[str, int | tuple[int, int]] = {}
        flags = (f"--connector={connector}", "--chunk-size=64", *flags)
        router_flags = ("--min-remote-tokens=1",)
        super().__init__(folder, *flags, prefill=1, decode=len(num_ranks) - 1, router_flags=router_flags)

    def flags_of(self, address: str) -> Sequence[str]:
        if address not in self._ranks_at:
            self._ranks_at[address] = self._num_ranks.pop(0)
        one = self._ranks_at[address]
        num_stages, number = (1, one) if isinstance(one, int) else one
        if self._dealt == "requests":
            return (f"--data-parallel-size={number}",)
        return (
            f"--pipeline-parallel-size={num_stages}",
            f"--tensor-parallel-size={number}",
            f"--expert-parallel-size={number if self._dealt else 1}",
        )


NAMES = ("one-token", "capital", "story", "chat-capital", "ledger-1200")


@pytest.mark.parametrize(
    ("connector", "num_ranks"),
    [
        ("shared_storage", (1, NUM_RANKS)),
        pytest.param("nixl", (NUM_RANKS, 1), marks=needs_nixl),
        pytest.param("nixl", (NUM_RANKS, NUM_RANKS), marks=needs_nixl),
        pytest.param("nixl", ((2, 1), NUM_RANKS), marks=needs_nixl),
        ("shared_storage", (NUM_RANKS, (4, 1))),
        pytest.param("nixl", (1, (2, NUM_RANKS)), marks=needs_nixl),
    ],
)
def test_unlike_pairs(
    connector: str,
    num_ranks: Sequence[int | tuple[int, int]],
    expected: Answers,
    salt: Salt,
    model_dir: object,
    tmp_path: Path,
) -> None:
    """A prefill worker hands over to a decode worker of as many ranks, or more, or fewer, or with another number of
    stages."""
    fleet = RankedFleet(tmp_path, connector, num_ranks)
    with running(fleet):
        results = ask(fleet, expected, NAMES, salt)
        assert results["ledger-1200"].report.num_blocks_moved >= 1200 // 16
        assert not any(result.report.fallback_reason for result in results.values())


def test_a_rank_that_is_killed_ends_its_worker_and_the_answer_goes_on(
    expected: Answers, salt: Salt, model_dir: object, tmp_path: Path
) -> None:
    """A decode worker's in mid-stream, and a prefill worker's between chunks."""
    story, ledger = BY_NAME["story"], BY_NAME["ledger-1200"]
    fleet = RankedFleet(tmp_path, "shared_storage", (NUM_RANKS, NUM_RANKS, NUM_RANKS))
    with running(fleet), fleet.client() as client, ThreadPoolExecutor(1) as pool:

        def ask_for(case: Case) -> Answer:
            prompt = expected[case.name].prompt_token_ids
            return client.generate(prompt, temperature=0.0, max_tokens=case.max_tokens, cache_salt=salt())

        answer = ask_for(story)
        next(iter(answer))
        decode = fleet.busy("decode")
        killed = kill_a_rank(decode)
        result = answer.result()
        check({story.name: result}, expected)
        assert result.report.num_migrations == 1
        see_it_end(decode, *killed)
        fleet.replace(decode)

        num_before = num_files(fleet)
        future = pool.submit(ask_for(ledger).result)
        wait_for("the first blocks are handed over", lambda: num_files(fleet) > num_before + 3, CALL_TIMEOUT_S)
        prefill = fleet.busy("prefill")
        killed = kill_a_rank(prefill)
        result = future.result()
        check({ledger.name: result}, expected)
        assert prefill.address in result.report.fallback_reason
        assert 0 < result.report.num_blocks_moved < 1200 // 16
        assert result.report.num_migrations == 0
        see_it_end(prefill, *killed)
        fleet.replace(prefill)


def kill_a_rank(worker: Member) -> tuple[int, int]:
    """Kills the first rank beside the engine. Returns its pid, and the other one's."""
    first, second = ranks_of(worker.process.popen.pid)
    os.kill(first, signal.SIGKILL)
    return first, second


def see_it_end(worker: Member, killed: int, other: int) -> None:
    assert worker.process.popen.wait(60) == 1
    assert f"(process {killed}) has ended" in worker.process.tail(40)
    wait_for("its other rank has ended", lambda: not Path(f"/proc/{other}").exists())


@pytest.mark.parametrize("dealt", ["experts", "requests"])
def test_experts_that_are_dealt_out(dealt: str, tmp_path: Path) -> None:
    """A prefill worker whose ranks have some experts each hands over to such a one, and to one process with all. The
    requests of a step may be dealt out, too."""
    path = make_model(tmp_path / "model", FAMILIES["mixtral"])
    for file, content in endless_tokenizer_files().items():
        (path / file).write_bytes(content)
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    rng = random.Random(5)
    flags = (f"--model={path}", "--dtype=float32", f"--cache-dir={tmp_path / 'cache'}")
    fleet = RankedFleet(tmp_path, "shared_storage", (2, 2, 1), *flags, dealt=dealt)
    used: set[str] = set()
    num_compared = 0
    with running(fleet), fleet.client() as client:
        for _ in range(20):  # the router chooses
            prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(length)] for length in (40, 131, 75, 110)]
            asked = [client.generate(prompt, temperature=0.0, max_tokens=50, ignore_eos=True) for prompt in prompts]
            for prompt, answer in zip(prompts, asked, strict=True):
                result = answer.result()
                assert result.report.prefill_worker
                used.add(result.report.decode_worker)
                with torch.inference_mode():
                    expected = greedy(reference, prompt)
                assert list(result.token_ids[: len(expected)]) == expected
                num_compared += len(expected)
            if len(used) == 2:
                break
    assert len(used) == 2
    assert num_compared > 50
