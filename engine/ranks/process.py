"""The process of any rank but the first: `python -m engine.ranks.process SOCKET`, started by `engine.ranks.launch`.
SOCKET is a descriptor that it inherits; others come over it.

It ends when rank 0 does, however that ends: Linux makes sure of it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from common.config import EngineSettings
from common.errors import BatonError, LostRankError, StartupError
from common.logs import setup_logging
from common.process.parent import die_with_parent
from common.version import VERSION
from engine.local.device import LocalDevice
from engine.ranks.alive import RankWatch
from engine.ranks.drawn_tokens import StepsAndTokens
from engine.ranks.meeting import CACHE, Place
from engine.ranks.messages import Channel, Done, Failed, Join, Message, Ready
from engine.ranks.shared_cache import SharedCache

log = logging.getLogger(__name__)


def ready(device: LocalDevice) -> Ready:
    """What the ranks compare."""
    info = device.info
    return Ready(
        release=VERSION,
        spec=info.spec,
        num_blocks=info.num_blocks,
        num_cache_blocks=len(device.kv_cache),
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        hidden_size=info.hidden_size,
        kernels=info.kernels,
    )


def checked(number: int, message: Message, own: Ready) -> Ready:
    """What rank `number` said of itself. Raises `StartupError` if it is not like rank 0, which says `own`."""
    if not isinstance(message, Ready):
        raise StartupError(f"rank {number} said {type(message).__name__}")
    fields = {name: getattr(message, name) for name in Ready.__struct_fields__}
    fields["spec"] = replace(message.spec, tp_rank=0)  # that of rank 0
    for name, theirs in fields.items():
        if theirs != getattr(own, name):
            raise StartupError(f"rank {number} differs from rank 0: {name} {theirs}, not {getattr(own, name)}")
    return message


def serve(channel: Channel, join: Join, files: Sequence[int]) -> None:
    """Computes what rank 0 says, until it closes the channel. `files` came with `join`, and stay the caller's."""
    by_name = dict(zip(join.files, files, strict=True))
    said = StepsAndTokens(channel)
    watch = RankWatch(join.pids)
    place = Place(join.layout, join.rank, by_name, watch.problem, has_core=join.has_core)
    pipeline = place.pipeline
    if join.layout.num_stages > 1:
        pipeline = replace(pipeline, drawn=said.token)
    try:
        device = LocalDevice(
            Path(join.model_dir),
            EngineSettings.model_validate_json(join.settings),
            raises=True,
            group=place.group,
            pipeline=pipeline,
            allocate=SharedCache(by_name[CACHE]).allocate,
        )
        channel.send(ready(device))
        _compute(channel, said, device)
    except LostRankError as error:
        log.warning("this rank ends", extra={"reason": error.message})
        _wait_for_end(channel)
    except (EOFError, ConnectionError):
        pass
    except Exception as error:
        if not isinstance(error, BatonError):
            log.exception("a rank failed")
        reason = error.message if isinstance(error, BatonError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):  # rank 0 may have found the same
            channel.send(Failed(reason))
    place.fail()
    place.close()


def _wait_for_end(channel: Channel) -> None:
    """Until rank 0 has found the rank that was lost. If this one ended before, others would name this one."""
    with contextlib.suppress(EOFError, OSError):
        while True:
            channel.receive()


def _compute(channel: Channel, said: StepsAndTokens, device: LocalDevice) -> None:
    while True:
        step = said.next_step()
        device.end(device.begin(step.as_input()))
        channel.send(Done(step.number))


def main() -> int:
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; rank 0 decides
    try:
        message, files = channel.receive()
    except (EOFError, OSError):
        return 1
    if not isinstance(message, Join):
        return 1
    setup_logging(message.name, level=message.log_level, log_format=message.log_format)
    if message.cores:
        os.sched_setaffinity(0, message.cores)
    serve(channel, message, files)
    return 0


if __name__ == "__main__":
    sys.exit(main())
