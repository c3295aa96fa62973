"""What is known of the times of a device of this process's own."""

from __future__ import annotations

import logging

from common.batch_time import BatchTime, BatchTimeKey
from common.batch_time_file import load
from common.config import EngineSettings
from common.errors import StartupError
from engine.hosts.device import HostsDevice
from engine.learning.key import key_of, model_file
from engine.learning.learner import KnownTimes, Source
from engine.learning.quick import quick_model
from engine.local.device import LocalDevice
from engine.ranks.device import RankedDevice

log = logging.getLogger(__name__)


def local_times(device: LocalDevice | RankedDevice | HostsDevice, settings: EngineSettings) -> KnownTimes:
    """What `baton profile` kept, else a rough model from some steps, which are computed now."""
    key = key_of(device, settings)
    model, source = _kept_model(settings.cache_dir, key), Source.FILE
    if model is None:
        model = quick_model(device, key, settings)
        source = Source.NONE if model is None else Source.QUICK
    return KnownTimes(key, model, source)


def _kept_model(cache_dir: str, key: BatchTimeKey) -> BatchTime | None:
    """What `baton profile` kept for this. A file that is of no use is named and left alone: the engine learns anew."""
    path = model_file(cache_dir, key)
    if not path.exists():
        return None
    try:
        return load(path, key)
    except StartupError as error:
        log.warning("the model of time is not used", extra={"reason": error.message})
        return None
