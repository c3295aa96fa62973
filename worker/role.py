"""Of which role a worker of both roles takes work now.

    SetRole(prefill)       --role-handover                        each second
       │ it is reported at once │ answers go on where they are     │ they are offered to their routers

A role is told, and nothing is refused for it: routers send work by what is reported, and who sends the other kind is
served. So a shift loses no request and no lease, and a router that has lost all other workers can use this one for
everything. The process that starts again after an end begins with `--start-role`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Literal

from common import metrics
from common.config import WorkerSettings
from common.errors import ConfigError, IncompatibleError
from common.types import WorkerRole

log = logging.getLogger(__name__)

OFFER_INTERVAL_S = 1.0
NOTICE_S = 0.5  # until every router knows the role: to one that does not, an offer means that the worker drains

Pin = Literal["set", "cleared"]
"""What an operator's order does to the pin; a planner's order says nothing of it."""


class RoleShifts:
    """`role` is what is reported. A worker of one role keeps it, and reports none."""

    def __init__(self, own: WorkerRole, settings: WorkerSettings, offer_handover: Callable[[], None]) -> None:
        """`own`: whose services the process has. Raises `ConfigError`."""
        if own is not WorkerRole.BOTH:
            for name in ("start_role", "pin_role"):
                if getattr(settings, name) != type(settings).model_fields[name].default:
                    raise ConfigError(name, f"is for workers of both roles, and this one is for {own.value}")
        self.moves = own is WorkerRole.BOTH
        self.role = WorkerRole(settings.start_role) if self.moves else own
        self.num_shifts = 0
        self.is_pinned = settings.pin_role
        self._own = own
        self._handover_s = settings.role_handover
        self._offer_handover = offer_handover
        self._offering: asyncio.Task[None] | None = None

    def begin(self) -> None:
        self._offer_or_not()

    def close(self) -> None:
        if self._offering is not None:
            self._offering.cancel()
            self._offering = None

    def check(self, role: WorkerRole, pin: Pin | None, num_shifts: int | None) -> None:
        """`num_shifts`: how often the role had changed when the caller looked; None: that does not matter. Raises
        `IncompatibleError` if the order is not to be carried out."""
        if not self.moves and role is not self._own:
            raise IncompatibleError(f"this worker has no other role than {self._own.value}")
        if pin is None and self.is_pinned:
            raise IncompatibleError(f"an operator has pinned its role, {self.role.value}")
        if num_shifts is not None and num_shifts != self.num_shifts:
            raise IncompatibleError(f"its role has changed meanwhile, and is {self.role.value}")

    def set(self, role: WorkerRole, pin: Pin | None, reason: str, num_streams: int) -> bool:
        """Takes work of `role` from now on, after `check`. `num_streams` go on. Returns whether anything changed."""
        before, was_pinned = self.role, self.is_pinned
        if pin is not None:
            self.is_pinned = self.moves and pin == "set"
        if role is not before:
            self.role = role
            self.num_shifts += 1
            by = "planner" if pin is None else "operator"
            metrics.worker_role_shifts.labels(role.value, by).inc()
            told = {"role": f"{before.value} -> {role.value}", "by": by, "num_streams": num_streams, "reason": reason}
            log.info("takes work of another role", extra=told)
            self._offer_or_not()
        return (before, was_pinned) != (self.role, self.is_pinned)

    def _offer_or_not(self) -> None:
        self.close()
        if self.moves and self.role is WorkerRole.PREFILL:
            self._offering = asyncio.create_task(self._offer())

    async def _offer(self) -> None:
        """Until the role changes again. A router without another decode worker takes no offer."""
        await asyncio.sleep(max(self._handover_s, NOTICE_S))
        while True:
            self._offer_handover()
            await asyncio.sleep(OFFER_INTERVAL_S)
