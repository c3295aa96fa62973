"""`python -I -S tether.py PARENT CORES COMMAND [ARGUMENT ...]`: becomes COMMAND, which Linux kills when PARENT ends.
It runs on CORES (as 0,1), or on any core if CORES is empty.

A program of its own, and not a function that runs between fork and exec: a process that has threads, as one that uses
gRPC has, can't safely run Python there.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(parent: int, cores: str, *command: str) -> None:
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    if prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"baton: error: prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it ended before the line above
        sys.exit(1)
    if cores:
        try:
            os.sched_setaffinity(0, [int(core) for core in cores.split(",")])
        except OSError:
            sys.exit(f"baton: error: --cpu-cores: none of {cores} is for this process")
    try:
        os.execvp(command[0], command)  # noqa: S606 - our own commands
    except OSError as error:
        sys.exit(f"baton: error: cannot run {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
