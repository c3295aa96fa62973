"""Workers whose model several processes compute: the same answers, whatever the other side's number of ranks is, and
without those of their processes that are killed. More pairs: test_rank_pairs.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from baton.client.sync_client import Answer
from tests.integration.ask import Salt, check
from tests.integration.prompts import BY_NAME, Case
from tests.integration.ranked import NUM_RANKS, RankedFleet, Size, check_pair
from tests.integration.reference import Expected
from tests.integration.stack import CALL_TIMEOUT_S, Member, ranks_of, running, wait_for
from tests.integration.test_killed_workers import num_files
from tests.nixl import needs_nixl

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

Answers = dict[str, Expected]


@pytest.mark.parametrize(
    ("connector", "sizes"),
    [("shared_storage", (1, NUM_RANKS)), pytest.param("nixl", ((2, 1), NUM_RANKS), marks=needs_nixl)],
)
def test_unlike_pairs(
    connector: str, sizes: Sequence[Size], expected: Answers, salt: Salt, model_dir: object, tmp_path: Path
) -> None:
    """More ranks take over from one, and from two stages."""
    check_pair(tmp_path, connector, sizes, expected, salt)


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
