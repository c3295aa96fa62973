"""A shared directory that hangs, as a network file system does whose server is gone: answers go on without it."""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from baton.client.report import Result
from baton.client.sync_client import Client
from tests.chaos.tiny_model import random_prompt, write_tiny_model
from tests.faults.disk import FreezingDisk
from tests.integration.stack import Fleet, running

pytestmark = pytest.mark.timeout(600)

PROMPT = random_prompt(random.Random(0), 300)
TIMEOUT_S = 3


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[FreezingDisk]:
    try:
        disk = FreezingDisk(tmp_path / "kv")
    except OSError as error:
        pytest.skip(f"no file system to freeze: {error}")
    yield disk
    disk.close()


def test_answers_go_on_without_it(tmp_path: Path, disk: FreezingDisk) -> None:
    model_dir = tmp_path / "model"
    write_tiny_model(model_dir)
    fleet = Fleet(tmp_path, f"--model={model_dir}", f"--transfer-timeout-s={TIMEOUT_S}", prefill=1, decode=1)

    def ask(client: Client, salt: str) -> Result:
        return client.generate(PROMPT, temperature=0.0, max_tokens=6, cache_salt=salt).result()

    with running(fleet), fleet.client() as client:
        before = ask(client, "before")
        assert (before.report.fallback_reason, before.report.num_blocks_moved) == ("", 19)
        with disk.frozen():
            # The first ones find out; then every thread of the prefill worker hangs, and it is known at once.
            for number in range(4):
                answer = ask(client, str(number))
                assert answer.token_ids == before.token_ids
                assert "kv_dir hangs" in answer.report.fallback_reason
            answer = ask(client, "before")
            assert answer.token_ids == before.token_ids
            assert answer.report.fallback_reason == ""
            prefill = fleet.members[0]
            prefill.process.popen.send_signal(signal.SIGTERM)
            assert prefill.process.popen.wait(60) == 0, "it ends, although its engine cannot"
            assert ask(client, "alone").token_ids == before.token_ids
        fleet.replace(prefill)
        fleet.settle()
        after = ask(client, "after")
        assert after.token_ids == before.token_ids
        assert (after.report.fallback_reason, after.report.num_blocks_moved) == ("", 19)
