"""What `--speculation` names: n-grams, a smaller model, or heads of the model itself."""

from __future__ import annotations

import logging
from pathlib import Path

from common.config import EngineSettings
from common.errors import ConfigError
from engine.device import Device
from engine.loading.embedded_model import ensure_model
from engine.local.device import LocalDevice
from engine.local.eagle import EagleDrafter, load_eagle
from engine.local.eagle_files import is_eagle
from engine.local.medusa import MedusaDrafter, is_medusa, load_medusa
from engine.speculation.draft_model import ModelDrafter, load_draft_model

log = logging.getLogger(__name__)


def load_drafter(settings: EngineSettings, device: Device) -> ModelDrafter | MedusaDrafter | EagleDrafter | None:
    """What guesses for the model of `device`; None if the setting names no files. Raises `StartupError`, and
    `ConfigError` for a device that cannot have it."""
    if settings.speculation in ("none", "ngram"):
        return None
    path = Path(settings.speculation).expanduser()
    for kind, is_kind in (("Medusa", is_medusa), ("EAGLE", is_eagle)):
        if not is_kind(path):
            continue
        if not isinstance(device, LocalDevice):
            raise ConfigError("--speculation", f"{kind} heads need the whole model in one process")
        model_dir = ensure_model(settings.model, settings.cache_dir, log.info)
        if kind == "Medusa":
            return load_medusa(path, device, model_dir)
        return load_eagle(path, device, settings, model_dir)
    return load_draft_model(settings, device)
