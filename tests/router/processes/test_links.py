"""What a router's parent and its processes do if the other one hangs: what each waits for and keeps is bounded."""

from __future__ import annotations

import asyncio
import math
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from common.config import RouterSettings
from common.errors import UnavailableError
from common.process.tasks import VitalTasks
from router.processes.child import Child
from router.processes.member import SIGNALS, Member, ProcessSpec, _say_last
from router.processes.messages import MAX_UNREAD_BYTES, Beat, Enter, Leave, Link, Message, Reply
from router.processes.parent import _Parent
from router.processes.remote_queue import RemoteQueue
from router.processes.shared_ledger import SharedLedger

PATIENCE_S = 60.0
SETTINGS = RouterSettings.model_validate({"decode": ("127.0.0.1:1",), "processes": 2})


async def link_of(end: socket.socket, max_unread_bytes: int = MAX_UNREAD_BYTES) -> Link:
    return Link(*await asyncio.open_unix_connection(sock=end), max_unread_bytes)


def place_in(folder: Path) -> ProcessSpec:
    return ProcessSpec(
        number=0,
        num_processes=2,
        directory=str(folder),
        epoch="e",
        http_listen="127.0.0.1:0",
        grpc_listen="127.0.0.1:0",
        health_listen=None,
        endpoint_picker_listen=None,
        pick_key=b"k" * 32,
        is_replacement=False,
    )


@pytest.fixture
def unblocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


async def test_an_end_that_does_not_read_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        link = await link_of(ours, max_unread_bytes=2**16)
        for number in range(100):
            link.send(Reply(number, [bytes(2**14)]))
        assert link._writer.transport.get_write_buffer_size() <= 2**16 + 2**15
        async with asyncio.timeout(PATIENCE_S):
            assert [message async for message in link.messages()] == []
    assert caplog.text.count("does not read what it is sent") == 1


async def test_a_place_is_not_waited_for_without_end() -> None:
    sent: list[Message] = []
    for max_wait_s, left_s in ((math.inf, 0.0), (0.0, 3600.0)):
        queue = RemoteQueue(1, sent.append, max_wait_s=max_wait_s, answer_wait_s=0.05)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(UnavailableError, match="gives no places"):
                async with queue.place("a", 1.0, left_s):
                    pass
    assert [type(message) for message in sent] == [Enter, Leave] * 2


@pytest.mark.parametrize("hangs", [True, False])
async def test_a_process_whose_parent_hangs_ends(tmp_path: Path, unblocked: None, hangs: bool) -> None:
    ledger = SharedLedger(str(tmp_path), 2)
    ours, theirs = socket.socketpair()
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    member = Member(SETTINGS, place_in(tmp_path), theirs, beat_s=0.01, parent_silent_beats=20)
    vital, enough = VitalTasks(), asyncio.Event()
    parent = await link_of(ours)

    async def answer() -> None:
        num_beats = 0
        async for _ in parent.messages():
            num_beats += 1
            if not hangs:
                parent.send(Beat(True))
                if num_beats == 50:
                    enough.set()

    answering = asyncio.create_task(answer())
    try:
        await member.start(vital)
        member.takes_signals()
        async with asyncio.timeout(PATIENCE_S):
            await vital.failed_or(enough)
        assert enough.is_set() != hangs
        assert ("no sign of life for 0.2 s" in str(vital.failure)) == hangs
    finally:
        await vital.close()
        answering.cancel()
        member.link.close()
        parent.close()
        theirs.close()
        member.shared.close()
        ledger.close()


async def test_a_parent_gives_signs_of_life(tmp_path: Path) -> None:
    parent = _Parent(SETTINGS, None, place_in(tmp_path), lambda: None)
    ours, theirs = socket.socketpair()
    link, other = await link_of(ours), await link_of(theirs)
    parent._children[0] = cast("Child", SimpleNamespace(link=link, num_silent=0, listens=True))
    watching = asyncio.create_task(parent._watch_silence())
    try:
        async with asyncio.timeout(PATIENCE_S):
            assert await anext(aiter(other.messages())) == Beat(True)
    finally:
        watching.cancel()
        link.close()
        other.close()
        parent._ledger.close()


def test_a_last_word_that_nobody_hears(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        _say_last(ours, "x" * 2**24, timeout_s=0.01)
    assert "does not hear why" in caplog.text
