"""The process of a rank that does not serve, of another host or of rank 0's: it ends with rank 0."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from common.config import EngineSettings, WorkerSettings
from common.errors import BatonError, ConfigError, LostRankError
from common.metric_relay import MetricRelay
from common.model_files import model_identity
from common.process.tasks import end_with_threads
from engine.connectors import create_connectors
from engine.hosts.gathering import Member, join
from engine.hosts.group import HostGroup
from engine.hosts.handshake import Purpose, Start, receive
from engine.hosts.kv_messages import COUNTERS, Open
from engine.hosts.launch import FurtherRanks, settings_of_rank
from engine.hosts.member_kv import MemberKV
from engine.hosts.place import Place, place_of
from engine.ranks.messages import Channel, Copy, Done, Failed, Step

if TYPE_CHECKING:
    from engine.local.device import LocalDevice
    from kv_store.base import KVConnector

log = logging.getLogger(__name__)

_LAST_WORD_S = 5.0  # for what rank 0 says at its end, or for the silence that says that it is lost


def run(settings: WorkerSettings, model_dir: Path) -> int:
    """A host that does not serve: its first rank, and the processes of its others. Returns 0 if rank 0 told it to end,
    else 1. Raises `StartupError` and `ConfigError`."""
    place = place_of(settings, os.environ)
    others = FurtherRanks(settings, model_dir, place)

    def failed(reason: str) -> None:
        log.error("this host's ranks end", extra={"reason": reason})
        os._exit(1)  # the others of this host end with this process

    try:
        others.watch(failed)
        code = run_rank(settings_of_rank(settings, place), model_dir, place)
    except BaseException:
        others.kill()
        raise
    others.wait()
    return code


def run_rank(settings: WorkerSettings, model_dir: Path, place: Place) -> int:
    """One rank, with its share of the host's threads and cores. Returns and raises as `run`."""
    end_with_threads()
    if settings.cpu_cores:
        os.sched_setaffinity(0, settings.cpu_cores)

    def gone(reason: str) -> None:
        if reason:
            log.error("this rank ends", extra={"reason": reason})
        else:
            log.info("rank 0 has ended, and so does this rank")
        os._exit(1 if reason else 0)  # the main thread may wait for values that never come

    _end_at_once_if_told()
    member = join(place, model_identity(model_dir), gone)
    _end_with_rank_0()
    log.info("joined", extra={"rank": place.rank, "num_hosts": place.num_hosts})
    return serve(place, settings, model_dir, member, MetricRelay(COUNTERS))


def _end_at_once_if_told() -> None:
    """A container's first process has no default action for signals: without a handler it would live on until it is
    killed."""

    def told(signum: int, _frame: object) -> None:
        log.info("this rank ends", extra={"signal": signum})
        os._exit(128 + signum)

    _handle_ends(told)


def _end_with_rank_0() -> None:
    """The first SIGTERM only says so: rank 0 drains, and needs this rank until then. The second one ends it."""

    def told(signum: int, _frame: object) -> None:
        log.info("this rank ends with rank 0; a second signal ends it now", extra={"signal": signum})
        _end_at_once_if_told()

    _handle_ends(told)


def _handle_ends(told: Callable[[int, object], None]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, told)


def serve(
    place: Place, settings: WorkerSettings, model_dir: Path, member: Member, relay: MetricRelay | None = None
) -> int:
    """Computes what rank 0 says, until it is gone. Returns 0 if it said so. `relay`: see `MemberKV`."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # as in torch's own documentation

    from engine.local.device import LocalDevice
    from engine.ranks.process import ready

    steps = member.sockets[Purpose.STEPS]
    channel = Channel(steps)
    kv: MemberKV | None = None
    try:
        start = receive(steps, Start)
        own = {"cache_dir": settings.cache_dir, "num_threads": settings.num_threads or len(settings.cpu_cores) or None}
        share = EngineSettings.model_validate_json(start.settings).model_copy(update=own)
        timeout = timedelta(seconds=place.timeout_s)
        store = TCPStore(steps.getpeername()[0], start.store_port, None, False, timeout, wait_for_workers=False)
        group = HostGroup(
            store,
            place.rank,
            place.num_ranks,
            start.address or steps.getsockname()[0],
            member.problem,
            timeout_s=place.timeout_s,
            num_here=place.ranks_per_host,
        )
        device = LocalDevice(model_dir, share, raises=True, group=group)
        [plane] = device.planes()
        kv = MemberKV(member.sockets[Purpose.KV], plane, partial(_connectors, settings), relay)
        kv.start()
        channel.send(ready(device))
        _compute(channel, device, kv.copied)
    except LostRankError as error:
        log.warning("this rank ends", extra={"reason": error.message})
        return 1
    except (EOFError, ConnectionError):
        return 0 if _has_said_end(member) else 1
    except Exception as error:
        reason = error.message if isinstance(error, BatonError) else f"{type(error).__name__}: {error}"
        log.exception("this rank failed")
        with contextlib.suppress(OSError):
            channel.send(Failed(reason))
        return 1
    finally:
        member.close()
        if kv is not None:
            kv.close()
    return 0


def _has_said_end(member: Member) -> bool:
    """Whether rank 0, which is gone, said that it ends. What it said may come after the end of another connection."""
    if member.beats is None:
        return False
    member.beats.wait(_LAST_WORD_S)
    return member.beats.has_said_end


def _connectors(settings: WorkerSettings, opening: Open) -> list[KVConnector]:
    """Of this rank. Raises `ConfigError` if its settings name others than rank 0's."""
    for flag, own, theirs in (
        ("--connector", settings.connector, opening.connector),
        ("--store", settings.store, opening.store),
    ):
        if own != theirs:
            raise ConfigError(flag, f"is {own or 'none'} here, but {theirs or 'none'} for rank 0")
    connector, store = create_connectors(settings, epoch=opening.epoch, worker_id=opening.worker_id)
    return [connector] if store is None else [connector, store]


def _compute(channel: Channel, device: LocalDevice, copied: Callable[[], None]) -> None:
    """`copied` is called when the copies of one message are done."""
    while True:
        message, _ = channel.receive()
        match message:
            case Step():
                ticket = device.begin(message.as_input())
                if message.copies:
                    copied()
                device.end(ticket)
                channel.send(Done(message.number))
            case Copy():
                device.copy(message.as_copies())
                copied()
            case _:
                raise ValueError(f"rank 0 said {type(message).__name__}")
