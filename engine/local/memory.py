"""How much memory the weights, the KV cache and the context take, and whether it is there."""

from __future__ import annotations

import torch

from common.config import EngineSettings
from common.errors import StartupError
from common.model_files import ModelFiles, read_safetensors_header
from common.types import KVCacheSpec
from engine.local.host_memory import available_bytes
from engine.models.registry import is_read, max_positions
from engine.models.transformers_model import is_mxfp4

GIB = 1 << 30
_CODES = {"I32": 8, "I8": 1, "F8_E4M3": 1}  # weights that an element of a quantised checkpoint holds
_MXFP4_CODES = {"_blocks": 2, "_scales": 0}  # the same in experts of mxfp4, which are always widened: by end of name
DEFAULT_CPU_KV_CACHE_GB = 1.0
_CPU_RESERVE_BYTES = 256 << 20  # activations, workspaces, Python
_CUDA_RESERVE_BYTES = 1 << 30  # the same on a device, kernels' workspaces included


def weight_bytes(files: ModelFiles, itemsize: int, *, stays_quantised: bool = True) -> int:
    """Bytes that the checkpoint's tensors take with `itemsize` bytes per element; quantised ones as many as in the
    file, unless they are widened. Those that nobody reads take none, such as a vision tower."""
    total = 0
    if files.is_gguf:
        from engine.loading.checkpoints.gguf_file import read_gguf  # what they import takes long, and few files need it
        from engine.loading.checkpoints.gguf_tensors import PLAIN

        for tensor in read_gguf(files.weight_files[0]).tensors.values():
            is_kept = stays_quantised and len(tensor.shape) > 1 and tensor.kind not in PLAIN
            total += tensor.num_bytes if is_kept else tensor.num_elements * itemsize
        return total
    widened = _MXFP4_CODES if is_mxfp4(files.config) else {}
    for file in files.weight_files:
        header, _ = read_safetensors_header(file)
        for name, entry in header.items():
            if name == "__metadata__" or not isinstance(entry, dict) or not is_read(files, name):
                continue
            count = 1
            for size in entry["shape"]:
                count *= size
            codes = _CODES.get(entry["dtype"], 0)  # of a quantised matrix
            if entry["dtype"] == "U8" and (ends := [end for end in widened if name.endswith(end)]):
                total += count * widened[ends[0]] * itemsize
            elif codes and stays_quantised:
                start, end = entry["data_offsets"]
                total += end - start
            else:
                total += count * max(codes, 1) * itemsize
    return total


def check_weights_fit(
    files: ModelFiles, *, dtype: torch.dtype, device: torch.device, stays_quantised: bool, share: float = 1.0
) -> None:
    """Raises `StartupError` if the weights need more memory than this machine has left. `share` of them is for the
    ranks of this host, which all have to ask before any of them loads."""
    available = available_bytes() if device.type == "cpu" else None
    if available is None:
        return
    needed = share * weight_bytes(files, dtype.itemsize, stays_quantised=stays_quantised)
    if needed > available:
        raise StartupError(
            f"the weights of {files.path} need {needed / GIB:.1f} GiB in {dtype}, "
            f"{available / GIB:.1f} GiB are available; take a smaller --model or --dtype bfloat16"
        )


def num_cache_blocks(
    spec: KVCacheSpec, device: torch.device, settings: EngineSettings, num_caches: int = 1, *, num_stages: int = 1
) -> int:
    """How many blocks the KV cache gets. Raises `StartupError` if memory does not suffice; on a CPU, for so many caches
    on this host, each of which so many ranks have together."""
    if device.type == "cpu":
        available, flag = available_bytes(), "--kv-cache-memory-gb"
        room = None if available is None else available - num_caches * num_stages * _CPU_RESERVE_BYTES
        wanted = (settings.kv_cache_memory_gb or DEFAULT_CPU_KV_CACHE_GB) * GIB
    else:
        num_caches = 1  # here: others are on devices of their own
        free, total = torch.cuda.mem_get_info(device)
        flag = "--memory-utilization" if settings.kv_cache_memory_gb is None else "--kv-cache-memory-gb"
        room = free - _CUDA_RESERVE_BYTES
        # Of this process alone: others of a stack have shares of their own on the same device.
        own = torch.cuda.memory_reserved(device)
        share = total * settings.memory_utilization - own - _CUDA_RESERVE_BYTES
        wanted = share if settings.kv_cache_memory_gb is None else settings.kv_cache_memory_gb * GIB
    if settings.num_blocks is not None:
        wanted, flag = settings.num_blocks * spec.block_bytes, "--num-blocks"
    if room is not None and wanted * num_caches > room:
        raise StartupError(
            f"the KV cache needs {wanted * num_caches / GIB:.2f} GiB, {max(room, 0) / GIB:.2f} GiB are available on "
            f"{device}; lower {flag}"
        )
    num_blocks = int(wanted // spec.block_bytes)
    if num_blocks < 1:
        raise StartupError(
            f"the KV cache has {max(wanted, 0) / GIB:.3f} GiB, less than one block of "
            f"{spec.block_bytes} bytes; raise {flag}"
        )
    return num_blocks


def longest_context(files: ModelFiles, settings: EngineSettings) -> int:
    limit = max_positions(files)
    if settings.max_model_len is None:
        return limit
    if settings.max_model_len > limit:
        raise StartupError(
            f"--max-model-len {settings.max_model_len} is more than the {limit} positions of {files.path}"
        )
    return settings.max_model_len
