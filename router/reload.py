"""Settings that a running router takes over when its file (`--config`) changes. The others wait for a restart: the log
names those that changed. A file that cannot be used changes nothing.

Keys, limits and certificates have files of their own, which are read again by whoever uses them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from common.config import LimitSettings, PolicySettings, RouterSettings
from common.errors import BatonError, StartupError
from common.logs import set_level
from common.process.watched_files import FilesInUse, WatchedFiles
from router.limits.request_queue import Places
from router.make_gateway import policy_of
from router.running.routes import Routes

log = logging.getLogger(__name__)

RELOADED = frozenset({*PolicySettings.model_fields, *LimitSettings.model_fields, "log_level"}) - {"limits_file"}


@dataclass(slots=True, frozen=True)
class SettingsFile:
    """`load` reads the file at `path` and all that wins over it. Raises `ConfigError`."""

    path: str
    load: Callable[[], RouterSettings]


class Reload:
    """Looks at the file when it is asked to."""

    def __init__(self, settings: RouterSettings, file: SettingsFile, routes: Routes, queue: Places) -> None:
        """`settings` are those that the router runs with. Raises `StartupError` if the file has others by now that
        cannot be used."""
        self._settings = settings
        self._file = file
        self._routes = routes
        self._queue = queue
        self._watched = WatchedFiles("settings", [file.path], self._load)
        self._version = 0
        self._take_over(self._watched.current())

    def look(self) -> None:
        """Takes over what has changed since the last time."""
        settings, version = self._watched.versioned()
        if version != self._version:
            self._version = version
            self._take_over(settings)

    def in_use(self) -> FilesInUse:
        """What is known of the file, after `look`."""
        self.look()
        return self._watched.in_use()

    def _load(self) -> RouterSettings:
        try:
            settings = self._file.load()
            policy_of(settings)
        except BatonError as error:
            raise StartupError(error.message) from error
        return settings

    def _take_over(self, settings: RouterSettings) -> None:
        before, self._settings = self._settings, settings
        changed = {name for name in RouterSettings.model_fields if getattr(before, name) != getattr(settings, name)}
        if changed & PolicySettings.model_fields.keys():
            self._routes.policy = policy_of(settings)
        if changed & LimitSettings.model_fields.keys():
            self._queue.change(
                settings.max_running, max_waiting=settings.max_queued, max_wait_s=settings.max_queue_wait
            )
            self._routes.late.refuses = settings.slo_late == "refuse"
        if "log_level" in changed:
            set_level(settings.log_level)
        if taken := sorted(changed & RELOADED):
            log.info("settings changed", extra={"settings": ", ".join(taken)})
        if waiting := sorted(changed - RELOADED):
            log.warning("settings changed that need a restart", extra={"settings": ", ".join(waiting)})
