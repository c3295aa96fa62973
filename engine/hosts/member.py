"""The process of a host that does not serve: it computes one rank, and ends with rank 0."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from common.config import EngineSettings
from common.errors import BatonError, LostRankError
from common.model_files import model_identity
from engine.hosts.gathering import Member, join
from engine.hosts.group import HostGroup
from engine.hosts.handshake import Purpose, Start, receive
from engine.hosts.place import Place, place_of
from engine.ranks.messages import Channel, Copy, Done, Failed, Step

if TYPE_CHECKING:
    from engine.local.device import LocalDevice

log = logging.getLogger(__name__)

_STORE_S = 60.0


def run(settings: EngineSettings, model_dir: Path) -> int:
    """Returns 0 if rank 0 told it to end, else 1. Raises `StartupError` and `ConfigError`."""
    place = place_of(settings, os.environ)
    if settings.cpu_cores:
        os.sched_setaffinity(0, settings.cpu_cores)

    def lost(reason: str) -> None:
        log.error("this rank ends", extra={"reason": reason})
        os._exit(1)  # the main thread may wait for values that never come

    member = join(place, model_identity(model_dir), lost)
    _end_with_rank_0()
    log.info("joined", extra={"rank": place.index, "num_hosts": place.num_hosts})
    return serve(place, settings, model_dir, member)


def _end_with_rank_0() -> None:
    """The first SIGTERM only says so: rank 0 drains, and needs this rank until then. The second one ends it."""

    def told(signum: int, _frame: object) -> None:
        log.info("this rank ends with rank 0; a second signal ends it now", extra={"signal": signum})
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, told)


def serve(place: Place, settings: EngineSettings, model_dir: Path, member: Member) -> int:
    """Computes what rank 0 says, until it is gone."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # as in torch's own documentation

    from engine.local.device import LocalDevice
    from engine.ranks.process import ready

    steps = member.sockets[Purpose.STEPS]
    channel = Channel(steps)
    try:
        start = receive(steps, Start)
        own = {"cache_dir": settings.cache_dir, "num_threads": settings.num_threads or len(settings.cpu_cores) or None}
        share = EngineSettings.model_validate_json(start.settings).model_copy(update=own)
        store = TCPStore(
            steps.getpeername()[0], start.store_port, None, False, timedelta(seconds=_STORE_S), wait_for_workers=False
        )
        group = HostGroup(store, place.index, place.num_hosts, steps.getsockname()[0], member.problem)
        device = LocalDevice(model_dir, share, raises=True, group=group)
        channel.send(ready(device))
        _compute(channel, device)
    except LostRankError as error:
        log.warning("this rank ends", extra={"reason": error.message})
        return 1
    except (EOFError, ConnectionError):
        log.info("rank 0 has ended, and so does this rank")
        return 0
    except Exception as error:
        reason = error.message if isinstance(error, BatonError) else f"{type(error).__name__}: {error}"
        log.exception("this rank failed")
        with contextlib.suppress(OSError):
            channel.send(Failed(reason))
        return 1
    finally:
        member.close()
    return 0


def _compute(channel: Channel, device: LocalDevice) -> None:
    while True:
        message, _ = channel.receive()
        match message:
            case Step():
                device.end(device.begin(message.as_input()))
                channel.send(Done(message.number))
            case Copy():
                device.copy(message.as_copies())
            case _:
                raise ValueError(f"rank 0 said {type(message).__name__}")
