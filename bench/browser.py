"""Chromium without a window, by the DevTools protocol over two pipes: what a browser sees of a page, and when."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import os
import signal
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from common.errors import InternalError

FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
MOST_BYTES = 2**24  # of a message
END_S = 10.0
_COMMANDS, _ANSWERS = 3, 4  # where the browser reads and writes
_ABOVE = 10  # descriptors of ours, so that none of them is one of those

Json = dict[str, object]


class Browser:
    def __init__(self, pid: int, commands: int, answers: asyncio.StreamReader) -> None:
        self.pid, self._commands, self._answers = pid, commands, answers
        self._numbers = itertools.count(1)

    async def call(self, method: str, params: Json | None = None, session: str = "") -> Json:
        """One command and its result. Raises `InternalError` if the browser refuses it or is gone."""
        number = next(self._numbers)
        asked = {"id": number, "method": method, "params": params or {}} | ({"sessionId": session} if session else {})
        os.write(self._commands, json.dumps(asked).encode() + b"\0")
        while True:  # events come between
            try:
                told = json.loads((await self._answers.readuntil(b"\0"))[:-1])
            except asyncio.IncompleteReadError as error:
                raise InternalError(f"the browser ended before it answered {method}") from error
            if told.get("id") == number:
                break
        if "error" in told:
            raise InternalError(f"{method}: {told['error'].get('message')}")
        result: Json = told["result"]
        return result

    @asynccontextmanager
    async def tab(self) -> AsyncIterator[str]:
        """The session of an empty page with nothing in its cache."""
        context = (await self.call("Target.createBrowserContext"))["browserContextId"]
        target = (await self.call("Target.createTarget", {"url": "about:blank", "browserContextId": context}))[
            "targetId"
        ]
        attached = await self.call("Target.attachToTarget", {"targetId": target, "flatten": True})
        try:
            yield str(attached["sessionId"])
        finally:
            await self.call("Target.disposeBrowserContext", {"browserContextId": context})

    async def value(self, script: str, session: str) -> object:
        """What a promise becomes that `script` makes in the page."""
        told = await self.call(
            "Runtime.evaluate", {"expression": script, "awaitPromise": True, "returnByValue": True}, session
        )
        if "exceptionDetails" in told:
            raise InternalError(f"the page's script failed: {told['exceptionDetails']}")
        result = told["result"]
        assert isinstance(result, dict)
        return result.get("value")

    async def close(self, end_s: float = END_S) -> None:
        """Kills it if it does not end within `end_s`."""
        ended = asyncio.ensure_future(asyncio.to_thread(os.waitid, os.P_PID, self.pid, os.WEXITED | os.WNOWAIT))
        try:
            with contextlib.suppress(InternalError, OSError, TimeoutError):
                async with asyncio.timeout(end_s):
                    await self.call("Browser.close")
                    await asyncio.shield(ended)
        finally:
            os.kill(self.pid, signal.SIGKILL)  # to one that has ended it does nothing
            await ended
            await asyncio.to_thread(os.waitpid, self.pid, 0)


@asynccontextmanager
async def browser(path: str, end_s: float = END_S) -> AsyncIterator[Browser]:
    """Chromium at `path` while inside; it has `end_s` to end. Raises `InternalError` if it does not start."""
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        (theirs_in, ours_out), (ours_in, theirs_out) = _pipe(), _pipe()
        stack.callback(os.close, ours_out)
        answers = stack.enter_context(os.fdopen(ours_in, "rb"))
        try:
            pid = _started(path, Path(folder) / "profile", theirs_in, theirs_out)
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        reader = asyncio.StreamReader(MOST_BYTES)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), answers
        )
        stack.callback(transport.close)
        opened = Browser(pid, ours_out, reader)
        try:
            yield opened
        finally:
            await opened.close(end_s)


def _started(path: str, profile: Path, commands: int, answers: int) -> int:
    moved = [(os.POSIX_SPAWN_DUP2, commands, _COMMANDS), (os.POSIX_SPAWN_DUP2, answers, _ANSWERS)]
    quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    arguments = [path, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    try:
        return os.posix_spawnp(path, arguments, os.environ, file_actions=[*moved, *quiet])
    except OSError as error:
        raise InternalError(f"{path} does not start: {error.strerror}") from error


def _pipe() -> tuple[int, int]:
    """Descriptors to read and to write."""
    made = os.pipe()
    try:
        read, write = (fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for fd in made)
        return read, write
    finally:
        for fd in made:
            os.close(fd)
