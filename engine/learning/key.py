"""What a model of time is for, and where it is kept."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path

import torch

from common.batch_time import BatchTimeKey
from common.config import EngineSettings
from common.cpu import read_cpu
from engine.hosts.device import HostsDevice
from engine.local.device import LocalDevice
from engine.ranks.device import RankedDevice


def key_of(device: LocalDevice | RankedDevice | HostsDevice, settings: EngineSettings) -> BatchTimeKey:
    """What a model of time for this device is for."""
    return BatchTimeKey(
        spec=device.info.spec.fingerprint(),
        quantization=settings.quantization,
        device=device.info.device,
        processor=read_cpu().name if device.info.device == "cpu" else torch.cuda.get_device_name(device.device),
        kernels=device.kernels_name,
        num_threads=torch.get_num_threads(),
    )


def model_file(cache_dir: str, key: BatchTimeKey) -> Path:
    """Where `baton profile` keeps the model that is for `key`, and a worker looks for it."""
    name = hashlib.blake2b(repr(sorted(asdict(key).items())).encode(), digest_size=8).hexdigest()
    return Path(cache_dir) / f"batch-time-{name}.json"
