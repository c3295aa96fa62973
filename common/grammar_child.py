"""`python -m common.grammar_child [MODEL_TOKENS]`: the child of `common.grammar_process`, which says what it is for.

One line of JSON on standard input is a job, one on standard output its answer.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from common.grammar_process import MAX_BYTES, MAX_CPU_S, STACK_BYTES, ModelTokens, stack_of
from common.grammar_trial import Trial
from common.guided import Guided

_BROKEN = 70  # exit code of a runner that broke for no reason that a signal names


def main(arguments: Sequence[str]) -> int:
    for ignored in (signal.SIGINT, signal.SIGTERM):  # they go to whole groups, and the parent still has answers to give
        signal.signal(ignored, signal.SIG_IGN)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    trial = Trial(ModelTokens(**json.loads(arguments[0])) if arguments else None)
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)  # a parser that breaks says so, in the client's words
    while (code := _run_one(trial)) != 0:
        _say({"died": code})
    return 0


def _run_one(trial: Trial) -> int:
    """Forks a runner, and waits for its end. Returns its exit code: 0 if there are no more jobs, -N if signal N ended
    it. This process has one thread, so that the copy of it is whole."""
    pid = os.fork()
    if pid == 0:
        try:
            threading.Thread(target=_exit_with_parent, daemon=True).start()
            with stack_of(STACK_BYTES):
                runner = threading.Thread(target=_do_jobs, args=(trial,))
                runner.start()
            runner.join()
        finally:
            os._exit(_BROKEN)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _exit_with_parent() -> None:
    """Whatever this process is at: nobody waits for the answer."""
    closed = select.poll()
    closed.register(0, 0)  # reports a hang-up alone
    closed.poll()
    os._exit(0)


def _do_jobs(trial: Trial) -> None:
    for line in sys.stdin.buffer:
        _say(_within_limits(trial, json.loads(line)))
    os._exit(0)


def _within_limits(trial: Callable[[Guided], tuple[str, int]], job: dict[str, object]) -> dict[str, object]:
    """The answer. If it takes more than the limits, the kernel ends this process."""
    (kind,) = job
    before = _data_bytes()
    _limit_memory(before + MAX_BYTES)
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
    try:
        grammar, num_bytes = trial(_guided(kind, job[kind]))
    except ValueError as error:
        return {"wrong": str(error)}
    except MemoryError:
        signal.raise_signal(signal.SIGABRT)  # as native code does
        raise
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}
    except BaseException:
        return {"wrong": f"{kind} cannot be used: the compiler of grammars does not take it"}
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    return {"grammar": grammar, "bytes": num_bytes}


def _guided(kind: str, value: object) -> Guided:
    if isinstance(value, list):
        return Guided(choice=tuple(map(str, value)))
    if isinstance(value, bool):
        return Guided(json_object=value)
    return replace(Guided(), **{kind: str(value)})  # type: ignore[arg-type]


def _data_bytes() -> int:
    """Memory of this process that is its own, as `RLIMIT_DATA` counts it. 0 if the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmData:")), 0)


def _limit_memory(num_bytes: int) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    if num_bytes > MAX_BYTES and (hard == resource.RLIM_INFINITY or num_bytes < hard):
        resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, hard))


def _say(answer: dict[str, object]) -> None:
    left = memoryview(b"\n" + json.dumps(answer).encode() + b"\n")  # a runner that died may have left half a line
    while left:
        left = left[os.write(1, left) :]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
