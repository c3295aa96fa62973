"""The device of a worker whose ranks are on several hosts: rank 0's side. The other ranks of its own host are like
those of other hosts.

Steps go to the other ranks over TCP, values by Gloo. Each rank's KV cache lies in its own process, where this one does
not see it: each has connectors of its own (engine/hosts/kv.py). Blocks in host memory stay with each rank, too.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

import numpy as np
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # as in torch's own documentation

from common.config import EngineSettings
from common.errors import ConfigError, LostRankError, StartupError
from common.model_files import model_identity
from engine.blocks.host_tier import BlockCopy
from engine.device import Device, KVPlane, Ticket, do_nothing
from engine.hosts.gathering import Member, MemberWatch, gather, start_all
from engine.hosts.group import HostGroup
from engine.hosts.handshake import Purpose, Start
from engine.hosts.kv import KVLink, join_hosts
from engine.hosts.kv_messages import Open
from engine.hosts.launch import FurtherRanks, settings_of_rank
from engine.hosts.place import Place, place_of
from engine.local.device import LocalDevice, warm_up_rows
from engine.ranks.launch import check_supported, share_of_rank
from engine.ranks.messages import Copy, Step
from engine.ranks.others import OtherRanks, info_of_all
from engine.ranks.process import checked, ready
from engine.step import StepInput, StepOutput
from kv_store.base import KVConnector

log = logging.getLogger(__name__)


def share_of_host(settings: EngineSettings, model_dir: Path) -> EngineSettings:
    """What each rank computes with: threads and memory in `settings` are those of a host."""
    own = {"tensor_parallel_size": settings.tensor_parallel_size // settings.num_hosts, "expert_parallel_size": 1}
    sizes = {name: getattr(settings, name) for name in own}
    return share_of_rank(settings.model_copy(update=own), model_dir).model_copy(update=sizes)


class HostsDevice(Device):
    """A step that fails on one rank ends all: the others wait in it for values that never come."""

    def __init__(self, model_dir: Path, settings: EngineSettings, place: Place | None = None) -> None:
        """Starts the other ranks of this host, waits for those of other hosts, and loads the model, each rank its part.
        `place`: of the settings if None. Raises `StartupError` with one line if a rank cannot, or does not come, and
        `ConfigError` for settings that such ranks do not take."""
        check_supported(settings)
        place = place or place_of(settings, os.environ)
        if place.index:
            raise ConfigError("--host-index", f"is {place.index}: only host 0 serves")
        share = share_of_host(settings, model_dir)
        self._num_copies = 0  # messages with copies that were sent
        self._links: list[KVLink] = []
        self._other_planes: list[KVPlane] = []
        self._further = FurtherRanks(settings, model_dir, place)
        try:
            self._members = gather(place, model_identity(model_dir), self._further.check)
        except BaseException:
            self._further.kill()
            raise
        self._others = OtherRanks({one.number: one.channel for one in self._members}, MemberWatch(self._members))
        try:
            timeout = timedelta(seconds=place.timeout_s)
            self._store = TCPStore("localhost", 0, None, True, timeout, wait_for_workers=False)
            start = Start(settings=share.model_dump_json(), store_port=self._store.port)
            group = HostGroup(
                self._store,
                0,
                place.num_ranks,
                start_all(self._members, start, place.ranks_per_host),
                self._others.problem,
                timeout_s=place.timeout_s,
                num_here=place.ranks_per_host,
            )
            if place.ranks_per_host > 1 and (cores := settings_of_rank(settings, place).cpu_cores):
                os.sched_setaffinity(0, cores)
            self._local = LocalDevice(model_dir, share, raises=True, group=group)
            self._other_planes = [self._plane_of(member) for member in self._members]
        except (LostRankError, OSError) as error:
            self._leave()
            raise StartupError(str(error)) from error
        except RuntimeError as error:  # of torch
            reason = self._others.problem() or str(error).splitlines()[0]
            self._leave()
            raise StartupError(f"the ranks of {place.num_hosts} hosts do not find each other: {reason}") from error
        except BaseException:
            self._leave()
            raise
        self._shape = f"ranks on {place.num_hosts} hosts"
        if place.ranks_per_host > 1:
            self._shape = f"{place.num_ranks} {self._shape}"
        self.info = info_of_all(self._local.info, self._shape)
        self.device = self._local.device
        self._dealt = ", experts dealt out" if settings.expert_parallel_size > 1 else ""
        log.info("ranks of all hosts are ready", extra={"num_hosts": place.num_hosts, "num_ranks": place.num_ranks})

    @property
    def kernels_name(self) -> str:
        """Of a model of time, which is for as many ranks."""
        return f"{self._local.kernels_name}, {self._shape}{self._dealt}"

    def begin(self, step: StepInput) -> Ticket:
        ticket = self._local.begin(step)
        self._others.send(Step.of(step))
        self._num_copies += bool(step.copies)
        return ticket

    def end(self, ticket: Ticket, meanwhile: Callable[[], None] = do_nothing) -> StepOutput:
        """Raises `LostRankError` if a rank is gone: no step can be computed any more."""
        output = self._local.end(ticket, meanwhile)
        self._others.wait_for_step(ticket.number, meanwhile)
        return output

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Each rank copies its own, between the steps that come before and after. A step's own copies go with it."""
        if copies:
            self._local.copy(copies)
            self._others.send(Copy.of(copies))
            self._num_copies += 1

    def planes(self) -> list[KVPlane]:
        """Those of other ranks have no block here: their connectors do not need them."""
        return [*self._local.planes(), *self._other_planes]

    def open_connectors(
        self, opening: Open, connector: KVConnector, store: KVConnector | None
    ) -> tuple[KVConnector, KVConnector | None]:
        """Rank 0's, which `opening` names, joined with those that the other ranks open. Raises `StartupError` if a rank
        cannot."""
        own = [connector] if store is None else [connector, store]
        self._links = [
            KVLink(member.number, member.sockets[Purpose.KV], lambda: self._num_copies) for member in self._members
        ]
        try:
            joined = join_hosts(own, self._links, opening, self.check_alive)
        except (LostRankError, EOFError, OSError) as error:
            reason = self._others.problem() or f"a rank has gone while it opened its connectors: {error}"
            raise StartupError(reason) from error
        return joined[0], joined[1] if store is not None else None

    def warm_up(self) -> None:
        """As `LocalDevice.warm_up` does."""
        for row in warm_up_rows(self.info):
            self.execute([row])

    def check_alive(self) -> None:
        """Any thread may call it."""
        self._others.check()

    def say_end(self) -> None:
        for member in self._members:
            member.say_end()

    def close(self) -> None:
        """Ends the other ranks."""
        self.say_end()
        self._leave()

    def _leave(self) -> None:
        for member in self._members:
            member.close()
        for link in self._links:
            link.close()
        self._further.wait()

    def _plane_of(self, member: Member) -> KVPlane:
        """Waits until the rank has loaded its part. Raises `StartupError` if it is not like this one."""
        message, _ = self._others.answer(member.number)
        spec = checked(member.number, message, ready(self._local)).spec
        return KVPlane(spec=spec, cache=np.empty((0, *spec.block_shape), np.float32))
