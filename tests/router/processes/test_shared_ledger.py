"""What limits count, as several processes see it. Each ledger here is one process's."""

from __future__ import annotations

import contextlib
import multiprocessing
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.errors import InvalidArgumentError, OverloadedError, StartupError
from router.limits.gate import Gate, GateLimits
from router.limits.ledger import Ledger, LocalLedger
from router.limits.quotas import Quotas
from router.processes.shared_folder import shared_folder
from router.processes.shared_ledger import ROWS_AT_ONCE, TOTAL, SharedLedger

Open = Callable[[int | None], SharedLedger]


@pytest.fixture
def open_ledger(tmp_path: Path) -> Iterator[Open]:
    """One of two processes', or their parent's."""
    with contextlib.ExitStack() as stack:

        def make(process: int | None) -> SharedLedger:
            return stack.enter_context(contextlib.closing(SharedLedger(str(tmp_path), 2, process)))

        yield make


@pytest.fixture
def ledgers(open_ledger: Open) -> tuple[SharedLedger, SharedLedger]:
    return open_ledger(0), open_ledger(1)


@pytest.mark.parametrize("kind", ["local", "shared"])
def test_what_is_taken_is_there_until_it_is_given_back(kind: str, open_ledger: Open) -> None:
    ledger: Ledger = LocalLedger() if kind == "local" else open_ledger(0)
    assert ledger.take("a", 2, 3)
    assert not ledger.take("a", 2, 3)
    assert ledger.take("a", 1, 3)
    assert ledger.take("b", 3, 3)
    assert ledger.total("a") == 3
    ledger.give("a", 3)
    assert ledger.total("a") == 0
    with ledger.locked():
        state = ledger.state("a")
        assert list(state) == [0, 0, 0]
        state[1] = 2.5
        assert list(ledger.state("a")) == [0, 2.5, 0]
        ledger.forget_state("a")
        assert list(ledger.state("a")) == [0, 0, 0]


def test_processes_share_a_limit(ledgers: tuple[SharedLedger, SharedLedger]) -> None:
    one, other = ledgers
    assert one.take("requests", 2, 3)
    assert not other.take("requests", 2, 3)
    assert other.take("requests", 1, 3)
    assert one.total("requests") == 3
    assert other.by_process("requests") == [2, 1]


def test_rows_are_found_by_all_however_many_there_are(ledgers: tuple[SharedLedger, SharedLedger]) -> None:
    one, other = ledgers
    names = [f"key {number} \n" for number in range(ROWS_AT_ONCE + 10)]
    for number, name in enumerate(names):
        (one, other)[number % 2].take(name, number, 10**6)
    assert [one.total(name) for name in names] == list(range(len(names)))
    assert [other.total(name) for name in names] == list(range(len(names)))


def test_what_a_dead_process_had_in_flight_is_free_and_what_it_counted_stays(
    open_ledger: Open, ledgers: tuple[SharedLedger, SharedLedger]
) -> None:
    looks = open_ledger(None)
    one, other = ledgers
    one.take("requests", 2, 3)
    other.take("requests", 1, 3)
    one.put({f"{TOTAL}tokens": 40})
    assert looks.process_ended(0)
    assert other.by_process("requests") == [0, 1]
    next_one = open_ledger(0)
    next_one.put({f"{TOTAL}tokens": 2})
    assert other.total(f"{TOTAL}tokens") == 42


def test_a_lock_that_is_held_holds_up_no_parent(open_ledger: Open, ledgers: tuple[SharedLedger, SharedLedger]) -> None:
    looks = open_ledger(None)
    one, other = ledgers
    one.take("requests", 2, 3)
    with other.locked():
        assert not looks.process_ended(0)
        assert one._row("requests")[0] == 2
    assert looks.process_ended(0)
    assert other.by_process("requests") == [0, 0]
    with other.locked():  # nobody else has it
        pass


@pytest.mark.parametrize("lost", ["names", "folder"])
def test_files_that_somebody_removed_are_refused(tmp_path: Path, lost: str) -> None:
    folder = tmp_path / "ledger"
    folder.mkdir()
    with contextlib.closing(SharedLedger(str(folder), 2, 0)) as ledger:
        with contextlib.closing(SharedLedger(str(folder), 2, 1)):
            pass  # before the first row
        ledger.take("requests", 1, 3)
        shutil.rmtree(folder) if lost == "folder" else (folder / "names").unlink()
        with pytest.raises(StartupError, match="cannot be opened" if lost == "folder" else "rows and no names"):
            SharedLedger(str(folder), 2, 1)


def test_shared_memory_is_used_if_it_can_be(tmp_path: Path) -> None:
    assert shared_folder(tmp_path) == tmp_path
    assert shared_folder(tmp_path, min_mib=2**40) is None
    assert shared_folder(tmp_path / "none", min_mib=0) is None


def _take_many(directory: str, process: int) -> None:
    ledger = SharedLedger(directory, 2, process)
    for _ in range(2000):
        ledger.take("taken", 1, 3000)
        with ledger.locked():
            ledger.state("sum")[0] += 1


def test_no_change_is_lost_between_processes(tmp_path: Path, open_ledger: Open) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_take_many, args=(str(tmp_path), number)) for number in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    ledger = open_ledger(None)
    assert ledger.total("taken") == 3000
    with ledger.locked():
        assert ledger.state("sum")[0] == 4000


def test_a_key_has_its_limits_once_and_not_in_each_process(
    tmp_path: Path, ledgers: tuple[SharedLedger, SharedLedger]
) -> None:
    path = tmp_path / "limits.yaml"
    path.write_text("default: {requests_per_second: 2, tokens_per_second: 10, streams: 3}")
    now = 100.0
    one, other = (Quotas(str(path), lambda: now, ledger) for ledger in ledgers)
    for quotas in (one, other, one, other):
        quotas.request("ann", "")
    with pytest.raises(OverloadedError, match="2 requests a second"):
        one.request("ann", "")
    now += 0.5
    other.request("ann", "")
    with pytest.raises(OverloadedError):
        one.request("ann", "")
    one.prompt("ann", "", 20)
    other.answered("ann", "", 5)
    with pytest.raises(OverloadedError) as caught:
        other.prompt("ann", "", 1)
    assert caught.value.retry_after_s == pytest.approx(0.6)
    with one.streams("ann", "", 2), other.streams("ann", "", 1):
        with pytest.raises(OverloadedError, match="has 3 answers in flight"), other.streams("ann", ""):
            pass
        with other.streams("bob", "", 3):
            pass
    with pytest.raises(InvalidArgumentError), one.streams("ann", "", 4):
        pass
    with other.streams("ann", "", 3):
        pass


def test_the_gate_is_one(ledgers: tuple[SharedLedger, SharedLedger]) -> None:
    limits = GateLimits(max_requests=3, max_requests_per_key=2, max_buffered_bytes=100)
    one, other = (Gate(limits, time.monotonic, ledger) for ledger in ledgers)
    with one.requests("ann", 2):
        with pytest.raises(OverloadedError, match="this key has 2"), other.requests("ann"):
            pass
        with other.requests("bob"), pytest.raises(OverloadedError, match="the router has 3"), one.requests("eve"):
            pass
        with other.requests("bob"):
            pass
    with one.bytes_held() as held, other.bytes_held() as more:
        held.add(60)
        with pytest.raises(OverloadedError, match="60 bytes"):
            more.add(50)
        more.add(40)
    with other.bytes_held() as held:
        held.add(100)
