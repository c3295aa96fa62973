"""What ranks and stages have in common: one process's answers, what is refused, what becomes of lost processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from common.errors import ConfigError, LostRankError, StartupError
from engine.device_thread import DeviceThread
from engine.devices import open_device
from engine.local.device import LocalDevice
from engine.ranks import process
from engine.ranks.device import RankedDevice
from engine.ranks.launch import Rank, start_rank
from engine.ranks.messages import Channel, Join
from engine.ranks.pipeline import Pipeline
from engine.ranks.shared_memory import exchange_library
from engine.step import StepRow
from tests.engine.ranks.devices import OldChannel, answers, in_threads, repeat, rows, settings_of, staged

pytestmark = pytest.mark.skipif(exchange_library() is None, reason="the library was not built")

RANKS, STAGES = "tensor_parallel_size", "pipeline_parallel_size"
EITHER = pytest.mark.parametrize("kind", [RANKS, STAGES])


def flag(kind: str) -> str:
    return f"--{kind.replace('_', '-')}"


@pytest.mark.parametrize(
    ("num_stages", "num_ranks"),
    [(1, 2), (2, 1), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 4), (3, 1), (4, 1), (2, 2)))],
)
@pytest.mark.parametrize("mode", [pytest.param("recompute", marks=pytest.mark.slow), "swap"])
@pytest.mark.usefixtures("short_parts")
def test_answers_are_those_of_one_process(
    model: Path, num_stages: int, num_ranks: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks, batches, blocks found again, requests that give their blocks up and come back, steps that begin before
    others have ended, and whose rows stages compute in groups."""
    split: list[list[list[int]]] = []
    groups = Pipeline.groups

    def noted(self: Pipeline, rows: Sequence[StepRow]) -> list[list[int]] | None:
        found = groups(self, rows)
        split.extend([] if found is None else [found])
        return found

    monkeypatch.setattr(Pipeline, "groups", noted)
    changes = {"num_blocks": 9, "preemption_mode": mode, "swap_space_gb": 0.01, "host_cache_gb": 0.001}
    settings = settings_of(1, **changes)
    wanted, _ = answers(LocalDevice(model, settings), settings)
    with staged(model, num_stages, num_ranks, **changes) as device:
        thread = DeviceThread(device)
        given, num_preemptions = answers(thread, settings_of(num_ranks, run_ahead=True, **changes))
        thread.close()
    assert given == wanted
    assert num_preemptions > 0
    assert bool(split) == (num_stages > 1)


@EITHER
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": "simulated"}, "a simulated device takes the time that --simulated-time says"),
        ({"speculation": "another-model"}, "does not go with a draft model: take --speculation none or ngram"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(model: Path, kind: str, changes: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_device(model, settings_of(1, **{kind: 2}, **changes))
    assert caught.value.message == f"{flag(kind)}: {reason}"


@EITHER
def test_a_command_of_one_process_says_so(model: Path, kind: str) -> None:
    with pytest.raises(ConfigError, match=f"^{flag(kind)}: is for workers"):
        LocalDevice(model, settings_of(1, **{kind: 2}))


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size"), [(RANKS, 2), (STAGES, 3)])
def test_a_process_of_another_release_is_named(model: Path, kind: str, size: int) -> None:
    """The last one."""

    def serve(channel: Channel, join: Join, files: Sequence[int]) -> None:
        process.serve(OldChannel(channel) if join.rank == size - 1 else channel, join, files)

    with pytest.raises(StartupError, match=rf"^rank {size - 1} differs from rank 0: release 0\.0\.1, not "):
        RankedDevice(model, settings_of(1, **{kind: size}), in_threads(serve))


KILL, STOP = signal.SIGKILL, signal.SIGSTOP


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size", "victim", "signum", "is_idle"),
    [
        *((RANKS, 2, 1, signum, is_idle) for signum in (KILL, STOP) for is_idle in (False, True)),
        # Each signal to each stage that is not rank 0's, and at either time.
        (STAGES, 3, 1, KILL, False),
        (STAGES, 3, 1, STOP, True),
        (STAGES, 3, 2, STOP, False),
        (STAGES, 3, 2, KILL, True),
    ],
)
def test_real_processes(model: Path, kind: str, size: int, victim: int, signum: signal.Signals, is_idle: bool) -> None:
    pids: list[int] = []

    def start(number: int, num_threads: int) -> Rank:
        rank = start_rank(number, num_threads)
        pids.append(rank.process.pid)
        return rank

    settings = settings_of(1, **{kind: size})
    wanted, _ = answers(LocalDevice(model, settings_of(1)), settings_of(1))
    device = RankedDevice(model, settings, start)
    given, _ = answers(device, settings)
    assert given == wanted
    pid = pids[victim - 1]
    os.kill(pid, signum)
    what = "has ended" if signum == KILL else "was stopped by a signal"
    work: Callable[[], object] = device.check_alive if is_idle else lambda: device.compute(rows())
    with pytest.raises(LostRankError, match=rf"^rank {victim} \(process {pid}\) {what}$"):
        repeat(work)
    device.close()
    assert not any(Path(f"/proc/{one}").exists() for one in pids)
