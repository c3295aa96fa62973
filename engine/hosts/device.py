"""The device of a worker whose ranks are on several hosts: rank 0's side.

Steps go to the other ranks over TCP, values by Gloo. Each rank's KV cache lies in its own process, where this one does
not see it: blocks do not leave such a worker (engine/hosts/no_kv.py). Blocks in host memory stay with each rank.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # as in torch's own documentation

from common.config import EngineSettings
from common.errors import ConfigError, LostRankError, StartupError
from common.model_files import model_identity
from engine.blocks.host_tier import BlockCopy
from engine.device import Device, KVPlane, Ticket, do_nothing
from engine.hosts.gathering import Member, gather, start_all
from engine.hosts.group import HostGroup
from engine.hosts.handshake import Purpose, Start
from engine.hosts.place import Place, place_of
from engine.local.device import LocalDevice, warm_up_rows
from engine.ranks.launch import check_supported, share_of_rank
from engine.ranks.messages import LOOK_S, Copy, Done, Failed, Message, Step
from engine.ranks.process import checked, ready
from engine.step import StepInput, StepOutput

log = logging.getLogger(__name__)

_JOIN_S = 60.0  # that ranks, which are all there, may take to find each other's store


def share_of_host(settings: EngineSettings, model_dir: Path) -> EngineSettings:
    """What each host's rank computes with: threads and memory in `settings` are those of a host."""
    alone = settings.model_copy(update={"tensor_parallel_size": 1, "expert_parallel_size": 1})
    sizes = {"tensor_parallel_size": settings.num_hosts, "expert_parallel_size": settings.expert_parallel_size}
    return share_of_rank(alone, model_dir).model_copy(update=sizes)


class HostsDevice(Device):
    """A step that fails on one rank ends all: the others wait in it for values that never come."""

    def __init__(self, model_dir: Path, settings: EngineSettings, place: Place | None = None) -> None:
        """Waits for the other hosts' ranks and loads the model, each rank its part. `place`: of the settings if None.
        Raises `StartupError` with one line if a rank cannot, or does not come, and `ConfigError` for settings that such
        ranks do not take."""
        check_supported(settings)
        place = place or place_of(settings, os.environ)
        if place.index:
            raise ConfigError("--host-index", f"is {place.index}: only host 0 serves")
        share = share_of_host(settings, model_dir)
        self._said: dict[int, Message] = {}  # by rank: read, and not taken yet
        self._lock = threading.Lock()  # `check_alive` may be called beside a step
        self._members = gather(place, model_identity(model_dir))
        try:
            self._channels = {member.number: member.channel for member in self._members}
            self._store = TCPStore("localhost", 0, None, True, timedelta(seconds=_JOIN_S), wait_for_workers=False)
            start_all(self._members, Start(settings=share.model_dump_json(), store_port=self._store.port))
            own = self._members[0].sockets[Purpose.STEPS].getsockname()[0]
            group = HostGroup(self._store, 0, place.num_hosts, own, self._problem)
            self._local = LocalDevice(model_dir, share, raises=True, group=group)
            for member in self._members:
                self._compare(member)
        except (LostRankError, OSError) as error:
            self.close()
            raise StartupError(str(error)) from error
        except RuntimeError as error:  # of torch
            self.close()
            reason = self._problem() or str(error).splitlines()[0]
            raise StartupError(f"the ranks of {place.num_hosts} hosts do not find each other: {reason}") from error
        except BaseException:
            self.close()
            raise
        info = self._local.info
        spec = replace(info.spec, num_kv_heads=info.spec.num_kv_heads_in_all, tp_size=1, tp_rank=0)
        reason = f"{info.device_reason}; {place.num_hosts} hosts share the model"
        self.info = replace(info, spec=spec, device_reason=reason)
        self.device = self._local.device
        self._dealt = ", experts dealt out" if settings.expert_parallel_size > 1 else ""
        log.info("ranks of all hosts are ready", extra={"num_hosts": place.num_hosts})

    @property
    def kernels_name(self) -> str:
        """Of a model of time, which is for as many ranks."""
        return f"{self._local.kernels_name}, ranks on {1 + len(self._members)} hosts{self._dealt}"

    def begin(self, step: StepInput) -> Ticket:
        ticket = self._local.begin(step)
        self._send(Step.of(step))
        return ticket

    def end(self, ticket: Ticket, meanwhile: Callable[[], None] = do_nothing) -> StepOutput:
        """Raises `LostRankError` if a rank is gone: no step can be computed any more."""
        output = self._local.end(ticket, meanwhile)
        for member in self._members:
            message = self._answer(member, meanwhile)
            if message != Done(ticket.number):
                raise LostRankError(f"rank {member.number} said {message!r} to step {ticket.number}")
        return output

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Each rank copies its own, between the steps that come before and after."""
        if copies:
            self._local.copy(copies)
            self._send(Copy.of(copies))

    def planes(self) -> list[KVPlane]:
        """Rank 0's alone: nobody here sees the others."""
        return self._local.planes()

    def warm_up(self) -> None:
        """As `LocalDevice.warm_up` does."""
        for row in warm_up_rows(self.info):
            self.execute([row])

    def check_alive(self) -> None:
        """Any thread may call it."""
        if reason := self._problem():
            raise LostRankError(reason)

    def close(self) -> None:
        """Ends the other ranks."""
        for member in self._members:
            member.close()

    def _send(self, message: Message) -> None:
        for member in self._members:
            try:
                self._channels[member.number].send(message, while_full=self.check_alive)
            except OSError as error:
                raise LostRankError(self._problem() or f"rank {member.number} does not listen") from error

    def _compare(self, member: Member) -> None:
        """Waits until the rank has loaded its part. Raises `StartupError` if it is not like this one."""
        checked(member.number, self._answer(member, do_nothing), ready(self._local))

    def _answer(self, member: Member, meanwhile: Callable[[], None]) -> Message:
        """What the rank says next. Raises `LostRankError` if nothing will come."""
        channel = self._channels[member.number]
        while member.number not in self._said and not channel.has_message(LOOK_S):
            self.check_alive()
            meanwhile()
        with self._lock:
            if reason := self._read(member):
                raise LostRankError(reason)
            return self._said.pop(member.number)

    def _problem(self) -> str:
        """Why a rank will compute nothing any more, in one line; empty if all may. Never waits."""
        with self._lock:
            return next(filter(None, (self._read(member) or member.problem() for member in self._members)), "")

    def _read(self, member: Member) -> str:
        channel = self._channels[member.number]
        if member.number not in self._said and channel.has_message():
            try:
                self._said[member.number], _ = channel.receive()
            except (EOFError, OSError):
                return member.problem() or f"rank {member.number} has ended"
            except Exception as error:
                return f"rank {member.number} cannot be understood: {type(error).__name__}: {error}"
        message = self._said.get(member.number)
        return f"rank {member.number}: {message.reason}" if isinstance(message, Failed) else ""
