"""Log lines: one per event, to standard error, with `request_id` if there is one.

`log.warning("prefill failed, computing in place", extra={"request_id": id, "reason": why})` prints
`12:34:56.789 WARNING worker.x prefill failed, computing in place request_id=... reason=...`, or one JSON object with
`--log-format json`.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal

LogFormat = Literal["text", "json"]
LEVELS = ("debug", "info", "warning", "error")

log = logging.getLogger(__name__)

_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "color_message"}


def _extras(record: logging.LogRecord) -> dict[str, object]:
    return {key: value for key, value in vars(record).items() if key not in _STANDARD}


class TextFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__(f"%(asctime)s.%(msecs)03d %(levelname)s [{process}] %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        extras = " ".join([f"{key}={value}" for key, value in _extras(record).items()])
        if not extras:
            return line
        if not extras.isprintable():
            extras = " ".join([f"{key}={_in_one_line(str(value))}" for key, value in _extras(record).items()])
        head, newline, rest = line.partition("\n")
        return f"{head} {extras}{newline}{rest}"


def _in_one_line(text: str) -> str:
    """Escapes control characters: parts of a text come from clients and other processes, and must not look like further
    log lines or move a cursor."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


class JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process
        self._encode = json.JSONEncoder(default=str).encode

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "ts": round(record.created, 3),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
            **_extras(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return self._encode(line)


class RareLine:
    """A log line about something that may happen as often as others like: once in `interval_s` at most, with the number
    of times since the line before as `number`. Any thread may use it."""

    INTERVAL_S = 1.0

    def __init__(
        self,
        log: logging.Logger,
        words: str,
        clock: Callable[[], float] = time.monotonic,
        *,
        level: int = logging.INFO,
        number: str = "num_times",
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._log = log
        self._words = words
        self._clock = clock
        self._level = level
        self._number = number
        self._interval_s = interval_s
        self._lock = threading.Lock()
        self._num_times = 0  # not logged yet
        self._next_at = -math.inf

    def happened(self, extra: Mapping[str, object], num_times: int = 1) -> None:
        """`extra` is of this time; those of the times without a line are left out."""
        now = self._clock()
        with self._lock:
            self._num_times += num_times
            if now < self._next_at:
                return
            self._next_at = now + self._interval_s
            num_times, self._num_times = self._num_times, 0
        self._log.log(self._level, self._words, extra={**extra, self._number: num_times})


def setup_logging(process: str, *, level: str = "info", log_format: LogFormat = "text") -> None:
    """Sends all log lines of this process to standard error. `process` is its name in each line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process) if log_format == "json" else TextFormatter(process))
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    _leave_out_what_no_line_shows()
    _settled.clear()
    logging.getLogger("grpc._cython.cygrpc").addFilter(_is_for_operators)


def _leave_out_what_no_line_shows() -> None:
    """The place in the code, thread, process and task, which cost half as much as the rest of a line. The switches are
    those of the logging HOWTO."""
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    if sys.version_info >= (3, 12):
        logging.logAsyncioTasks = False


_settled: list[int] = []  # the level that holds again after debug lines; empty while that holds


def set_level(level: str) -> None:
    """Shows lines of this severity and more; debug lines that a signal asked for stay until it comes again."""
    if _settled:
        _settled[:] = [logging.getLevelNamesMapping()[level.upper()]]
    else:
        logging.getLogger().setLevel(level.upper())


def order_level(level: str) -> None:
    """Shows lines of this severity and more, whatever was asked for before. Says so if that changes anything."""
    number, root = logging.getLevelNamesMapping()[level.upper()], logging.getLogger()
    _settled.clear()
    if number != root.level:
        root.setLevel(min(number, logging.WARNING))  # for this line
        log.warning("another log level", extra={"least_severe": level})
        root.setLevel(number)


def shown_level() -> str:
    """The least severe lines that are shown now."""
    return logging.getLevelName(logging.getLogger().level).lower()


def shown_format() -> LogFormat:
    """That of this process's lines."""
    is_json = any(isinstance(handler.formatter, JsonFormatter) for handler in logging.getLogger().handlers)
    return "json" if is_json else "text"


def flip_debug() -> bool:
    """Shows debug lines from now on; called again, those of the level that held before. Returns whether it shows
    them now. Processes that belong together are told that (`show_debug`): if each flipped by itself, one that started
    meanwhile would do the contrary of the others."""
    is_on = not _settled
    show_debug(is_on)
    return is_on


def shows_debug() -> bool:
    """Whether a signal asked for debug lines."""
    return bool(_settled)


def show_debug(is_on: bool) -> None:
    """Shows debug lines from now on, or those of the level that held before. Says so if that changes anything."""
    root = logging.getLogger()
    if is_on == bool(_settled):
        return
    if is_on:
        _settled.append(root.level)
        root.setLevel(logging.DEBUG)
    else:
        root.setLevel(_settled.pop())
    log.warning("another log level", extra={"least_severe": logging.getLevelName(root.level).lower()})


_OF_CLIENTS = (
    "Invalid encoding on",  # a header that is no text
    "ExecuteBatchError raised in core by",  # a call that cannot be answered any more: its client has left
)


def _is_for_operators(record: logging.LogRecord) -> bool:
    """False for what gRPC logs, with a stack, about clients' behaviour: clients could fill the log with it."""
    return not str(record.msg).startswith(_OF_CLIENTS)
