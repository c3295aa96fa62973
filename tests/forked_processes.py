"""A plugin of pytest that runs tests in several processes: `--forks=4`. Each is a fork of the one that has imported and
collected them all.

The processes of pytest-xdist import and collect everything by themselves, which takes each of them more than ten
seconds of a core. A file's tests stay in one process, for what they share, and in their order. Files begin in the order
in which they were collected.

Collecting keeps one core busy. What `--early` names is collected and run beside that, by a process of its own.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass, field
from itertools import groupby, zip_longest
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import pytest

FORK = multiprocessing.get_context("fork")
Message = tuple[str, dict[str, Any]]
"""A hook of pytest to call in the first process, and its arguments; or NEXT, STOP or BROKEN."""
NEXT = "next"  # the process is ready for a test
STOP = "stop"  # a test has called `pytest.exit`
BROKEN = "broken"  # an error that is none of a test's
ORDERED = ("lf", "failedfirst", "stepwise", "at_most_seconds")  # options that choose or order tests


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--forks", type=int, metavar="N", help="run the tests in N forks of this process, file by file")
    parser.addoption("--early", metavar="PATH", help="with --forks: run these while the others are collected")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.forks is None:
        return
    if config.option.forks < 1:
        raise pytest.UsageError(f"--forks: {config.option.forks} is not a number of processes")
    if getattr(config.option, "numprocesses", None):
        raise pytest.UsageError("--forks and --numprocesses are two ways to do the same")
    # For numpy and torch, which start threads as they are imported. A developer's own values are for other runs.
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    early = config.option.early
    config.pluginmanager.register(Forks(config.option.forks, None if early is None else Path(early).resolve()))


@dataclass(slots=True, eq=False)
class Forked:
    """One of the processes, as the first one sees it."""

    process: ForkProcess
    messages: Connection
    is_early: bool
    ahead: deque[int] = field(default_factory=deque)  # of its file, those that it has not begun
    running: dict[str, Any] | None = None  # a test's `nodeid` and `location`


class Forks:
    def __init__(self, num: int, early: Path | None) -> None:
        self._num = num
        self._early = early
        self._num_started = 0
        self._begun: set[str] = set()  # names of tests
        self._forked: list[Forked] = []
        self._files: deque[deque[int]] = deque()  # that no process has begun; numbers of `session.items`

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> Generator[None, object, object]:
        if any(getattr(session.config.option, name, None) for name in ORDERED):
            self._early = None
        if self._early is not None and not session.config.option.collectonly:
            self._start(session, self._early)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TOKENIZERS_PARALLELISM", "false")  # so that they start no threads; they may in a test
            result = yield
        if not session.config.option.collectonly:
            _warm_up()
            gc.freeze()
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        option = session.config.option
        if option.collectonly or (session.testsfailed and not option.continue_on_collection_errors):
            return None  # pytest's own says so
        if names := _other_threads():
            raise pytest.UsageError(f"--forks: modules of tests start {len(names)} threads, which forks lack: {names}")
        terminal: Any = session.config.pluginmanager.getplugin("terminalreporter")
        terminal.showfspath = False  # tests of several files end in turn
        for path, numbers in groupby(range(len(session.items)), lambda number: session.items[number].path):
            if not self._is_early(path):
                self._files.append(deque(numbers))
        while self._files and len(self._forked) < self._num:
            self._start(session)
        while self._forked:
            self._receive(session)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        return True

    def _is_early(self, path: Path) -> bool:
        return self._early is not None and path.is_relative_to(self._early)

    def pytest_sessionfinish(self) -> None:
        for one in self._forked:  # those that still run end with their test, since nobody hears them
            one.messages.close()
        for one in self._forked:
            one.process.join(timeout=10)
            one.process.kill()
            one.process.join()

    def _start(self, session: pytest.Session, early: Path | None = None) -> None:
        session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined] # a folder for all
        ours, theirs = FORK.Pipe()
        number, self._num_started = self._num_started, self._num_started + 1

        def run() -> None:
            for one in self._forked:  # so that the others see when the first process closes its end
                one.messages.close()
            ours.close()
            session.config.pluginmanager.unregister(self)
            Child(session, theirs, number).run(early)

        process = FORK.Process(target=run)
        process.start()
        theirs.close()
        self._forked.append(Forked(process, ours, early is not None))

    def _receive(self, session: pytest.Session) -> None:
        """Waits for messages, and answers them. Processes that a test leaves keep connection and sentinel open."""
        ended = [one for one in self._forked if one.process.exitcode is not None]
        ready = wait([one.messages for one in self._forked], timeout=0 if ended else 0.2)
        for one in list(self._forked):
            if one.messages in ready:
                messages = None
                with contextlib.suppress(EOFError, OSError):  # it has ended; OSError: as it sent
                    messages = one.messages.recv()
                if messages is None:
                    self._end(session, one)
                for message in messages or ():
                    self._answer(session, one, message)
            elif one in ended:  # and all that it had sent until then was read
                self._end(session, one)

    def _answer(self, session: pytest.Session, one: Forked, message: Message) -> None:
        hook, arguments = message
        if hook == NEXT:
            with contextlib.suppress(ConnectionError):  # it has ended, as its next message will say
                one.messages.send(self._next(session, one))
        elif hook == STOP:
            one.running = None
            session.shouldstop = f"a test has called pytest.exit: {arguments['why']}"
        elif hook == BROKEN:
            raise RuntimeError(f"a process of the tests is broken:\n{arguments['text']}")
        elif hook == "pytest_runtest_logreport":
            config = session.config
            report = config.hook.pytest_report_from_serializable(config=config, data=arguments["data"])
            config.hook.pytest_runtest_logreport(report=report)
        elif hook == "pytest_warning_recorded":
            told = warnings.WarningMessage(**arguments.pop("warning"))
            session.config.hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": told, **arguments})
        else:  # a test begins or ends
            one.running = arguments if hook == "pytest_runtest_logstart" else None
            self._begun.add(arguments["nodeid"])
            getattr(session.config.hook, hook)(**arguments)

    def _next(self, session: pytest.Session, one: Forked) -> tuple[int, int | None] | None:
        """A test for this process, and the one that comes after it in its file; None if there is none."""
        if session.shouldfail or session.shouldstop:
            one.ahead, self._files = deque(), deque()
        if not one.ahead and self._files:
            one.ahead = self._files.popleft()
        if not one.ahead:
            return None
        number = one.ahead.popleft()
        return number, one.ahead[0] if one.ahead else None

    def _end(self, session: pytest.Session, one: Forked) -> None:
        """A process has ended. If it was in mid-test, the test has failed. Another one takes its place if there is
        anything to do."""
        self._forked.remove(one)
        one.messages.close()
        one.process.join()
        if one.running is not None:
            why = f"exit code {one.process.exitcode} of the process that ran this test"
            report = pytest.TestReport(**one.running, keywords={}, outcome="failed", longrepr=why, when="call")
            session.config.hook.pytest_runtest_logreport(report=report)
        elif one.process.exitcode != 0:
            raise RuntimeError(f"a process of the tests ended by itself: exit code {one.process.exitcode}")
        if one.is_early:
            left = enumerate(session.items)
            one.ahead.extend(n for n, item in left if self._is_early(item.path) and item.nodeid not in self._begun)
        if one.ahead:
            self._files.appendleft(one.ahead)
        if self._files:
            self._start(session)


def _other_threads() -> list[str]:
    """Names of all threads but this one. The system has a name for those that are not Python's."""
    names = {one.native_id: one.name for one in threading.enumerate()}
    for task in Path("/proc/self/task").glob("*"):  # none if the system is not Linux
        names.setdefault(int(task.name), (task / "comm").read_text().strip())
    return [name for number, name in names.items() if number != threading.get_native_id()]


def _warm_up() -> None:
    """Does what the first property of each process would do: hypothesis reads the source of all modules for numbers
    and words to try, and a table of all characters."""
    if "hypothesis" not in sys.modules:
        return
    from hypothesis import given, settings, strategies

    @settings(max_examples=1, database=None)
    @given(strategies.text())
    def nothing(_: str) -> None: ...

    nothing()


class Child:
    """One of the processes, from within. Its hooks tell the first process, whose plugins show and count."""

    def __init__(self, session: pytest.Session, messages: Connection, number: int) -> None:
        self._session, self._messages = session, messages
        self._last: pytest.Item | None = None  # the test that ran last
        config: Any = session.config
        plugins = config.pluginmanager
        plugins.getplugin("terminalreporter")._tw._file = open(os.devnull, "w")  # noqa: SIM115
        capture = plugins.getplugin("capturemanager")
        capture.stop_global_capturing()  # its files are one and the same for all forks
        capture.start_global_capturing()
        capture.suspend_global_capture()
        folders = config._tmp_path_factory
        folders._basetemp = folders.getbasetemp() / f"fork{number}"
        folders._basetemp.mkdir()
        self._unsent: list[Message] = []
        self._tells = False
        plugins.register(self)  # which calls for all earlier warnings
        self._tells = True

    def run(self, early: Path | None) -> None:
        """Runs the tests of `early`, which are collected here, or those that the first process names."""
        status = 1
        try:
            try:
                if early is None:
                    self._run_tests()
                else:
                    self._run_early(early)
            finally:
                self._tear_down_session()
            self._send_all()
            status = 0
        except pytest.exit.Exception as error:
            self._send(STOP, why=error.msg)
            status = 0
        except (EOFError, BrokenPipeError):  # the first process hears nothing any more
            pass
        except BaseException:
            self._send(BROKEN, text=traceback.format_exc())
        finally:
            for left in multiprocessing.active_children():
                left.terminate()
            os._exit(status)  # threads that a test left do not hold it up

    def _run_tests(self) -> None:
        items = self._session.items
        while True:
            self._send(NEXT)
            given: tuple[int, int | None] | None = self._messages.recv()
            if given is None:
                return
            number, following = given
            self._run_test(items[number], None if following is None else items[following])

    def _run_early(self, path: Path) -> None:
        session = self._session
        session.config.args = [str(path)]
        session.config.hook.pytest_collection(session=session)  # the first process says what is wrong with it
        for item, following in zip_longest(session.items, session.items[1:]):
            if session.shouldfail or session.shouldstop:
                return
            self._run_test(item, following)

    def _run_test(self, item: pytest.Item, following: pytest.Item | None) -> None:
        # What the session has is kept at the end of a file: as if a test of no file came next.
        next_item: Any = following or self._session
        self._last = item
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)

    def _tear_down_session(self) -> None:
        """Ends what lives as long as the session. What fails then is told as an error of the last test."""
        state, passed_on = self._session._setupstate, (pytest.exit.Exception, KeyboardInterrupt)
        call = pytest.CallInfo.from_call(lambda: state.teardown_exact(None), when="teardown", reraise=passed_on)
        if call.excinfo is not None and self._last is not None:
            hook = self._last.ihook
            hook.pytest_runtest_logreport(report=hook.pytest_runtest_makereport(item=self._last, call=call))

    def _send(self, hook: str, *, later: bool = False, **arguments: Any) -> None:
        """`later`: with the next message, since each wakes the first process."""
        self._unsent.append((hook, arguments))
        if not later:
            self._send_all()

    def _send_all(self) -> None:
        messages, self._unsent = self._unsent, []
        self._messages.send(messages)

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._send("pytest_runtest_logstart", nodeid=nodeid, location=location)

    def pytest_runtest_logfinish(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._send("pytest_runtest_logfinish", later=True, nodeid=nodeid, location=location)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        config = self._session.config
        data = config.hook.pytest_report_to_serializable(config=config, report=report)
        self._send("pytest_runtest_logreport", later=report.passed, data=data)

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: tuple[str, int, str] | None
    ) -> None:
        if not self._tells:
            return
        told = warning_message
        text = f"{told.category.__name__}: {told.message}"  # the category may not be known to the first process
        data = {"message": UserWarning(text), "category": UserWarning, "filename": told.filename, "lineno": told.lineno}
        self._send("pytest_warning_recorded", warning=data, when=when, nodeid=nodeid, location=location)
