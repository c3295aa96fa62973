"""Which attention backend runs where."""

from __future__ import annotations

import importlib.util
import logging

import torch

from common.errors import StartupError
from common.types import KVCacheSpec
from engine.attention.base import AttentionBackend, AttentionShape
from engine.attention.cpu import TorchBackend
from engine.attention.flashinfer import FlashInferBackend
from engine.attention.flashinfer_latent import FlashInferLatentBackend
from engine.attention.native import NativeBackend
from engine.attention.torch_reference import ReferenceBackend
from engine.kernels.library import Kernels

log = logging.getLogger(__name__)

BACKENDS: dict[str, type[AttentionBackend]] = {
    "torch": TorchBackend,
    "flashinfer": FlashInferBackend,
    "reference": ReferenceBackend,
}


def attention_backend(
    cache: torch.Tensor,
    spec: KVCacheSpec,
    shape: AttentionShape,
    name: str | None = None,
    kernels: Kernels | None = None,
    *,
    max_table_blocks: int | None = None,
    cascade: bool = False,
) -> AttentionBackend:
    """The backend called `name`, else the fastest that this device has. Raises `StartupError` for an unknown name.

    `kernels` are those of the CPU whose cache it is, None if it has none. `max_table_blocks`: of one sequence; as many
    as the cache has if None. `cascade`: of FlashInfer, blocks that rows share are read once."""
    if name is None:
        name = "native" if kernels is not None and NativeBackend.takes(spec) else _default_for(cache, spec, shape)
    if name == "native" and kernels is not None:
        log.info("attention backend", extra={"backend": name, "device": str(cache.device)})
        return NativeBackend(cache, spec, shape, kernels)
    backend = BACKENDS.get(name)
    if backend is None:
        raise StartupError(f"attention backend {name!r} is unknown; known are {', '.join(sorted(BACKENDS))}")
    if name == "flashinfer" and cache.device.type != "cuda":
        raise StartupError("attention backend flashinfer needs --device cuda")
    if name == "flashinfer" and spec.num_planes > 1 and shape.sinks is not None:
        raise StartupError("attention backend flashinfer: attention with sinks is not supported; take torch")
    log.info("attention backend", extra={"backend": name, "device": str(cache.device)})
    if backend is FlashInferBackend and spec.num_planes == 1:
        return FlashInferLatentBackend(cache, spec, shape)
    if backend is FlashInferBackend:
        return FlashInferBackend(cache, spec, shape, max_table_blocks=max_table_blocks, cascade=cascade)
    return backend(cache, spec, shape)


def _default_for(cache: torch.Tensor, spec: KVCacheSpec, shape: AttentionShape) -> str:
    if cache.device.type != "cuda" or cache.dtype == torch.float32:  # FlashInfer has no float32 kernels
        return "torch"
    if spec.num_planes == 1 or shape.sinks is not None:
        kind = "to latents (MLA)" if spec.num_planes == 1 else "with sinks"
        log.warning("attention %s runs on torch on this device, without kernels of its own", kind)
        return "torch"
    if spec.head_dim not in (64, 128, 256):
        return "torch"
    if importlib.util.find_spec("flashinfer") is None:
        log.warning("flashinfer is not installed, attention will be slow; pip install 'baton-serve[flashinfer]'")
        return "torch"
    return "flashinfer"
