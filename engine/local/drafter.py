"""What `--speculation` names: n-grams, a smaller model, or heads of the model itself."""

from __future__ import annotations

import logging
from pathlib import Path

from common.config import EngineSettings
from common.errors import ConfigError
from engine.device import Device
from engine.loading.embedded_model import ensure_model
from engine.local.device import LocalDevice
from engine.local.medusa import MedusaDrafter, is_medusa, load_medusa
from engine.speculation.draft_model import ModelDrafter, load_draft_model

log = logging.getLogger(__name__)


def load_drafter(settings: EngineSettings, device: Device) -> ModelDrafter | MedusaDrafter | None:
    """What guesses for the model of `device`; None if the setting names no files. Raises `StartupError`, and
    `ConfigError` for a device that cannot have it."""
    if settings.speculation in ("none", "ngram"):
        return None
    heads = Path(settings.speculation).expanduser()
    if not is_medusa(heads):
        return load_draft_model(settings, device)
    if not isinstance(device, LocalDevice):
        raise ConfigError("--speculation", "Medusa heads need the whole model in one process")
    return load_medusa(heads, device, ensure_model(settings.model, settings.cache_dir, log.info))
