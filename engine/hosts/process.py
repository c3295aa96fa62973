"""The process of a host's further rank: `python -m engine.hosts.process`, started by `engine.hosts.launch`, which says
on its standard input what it computes. It ends with the process that started it."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from common.config import WorkerSettings
from common.errors import BatonError
from common.logs import setup_logging
from common.process.parent import die_with_parent
from engine.hosts.launch import Told
from engine.hosts.member import log, run_rank


def main() -> int:
    die_with_parent()
    told = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Told)
    setup_logging(f"rank {told.place.rank}", level=told.log_level, log_format=told.log_format)
    settings = WorkerSettings.model_validate_json(told.settings)
    try:
        return run_rank(settings, Path(told.model_dir), told.place)
    except BatonError as error:
        log.error("this rank ends", extra={"reason": error.message})
        return 1


if __name__ == "__main__":
    sys.exit(main())
