"""A model, loaded onto a device: what it is, whichever device computes with it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch

from common.config import EngineSettings
from common.errors import StartupError
from common.model_files import ModelFiles, model_identity, open_model
from common.types import KVCacheSpec
from engine.kernels.choice import Choice
from engine.kernels.library import Kernels, load_kernels
from engine.loading.dtype import resolve_dtype
from engine.loading.ends import known_ends
from engine.local.device_choice import choose_device
from engine.local.memory import check_weights_fit, longest_context, weight_bytes
from engine.local.vocabulary import Padding
from engine.models.base import CausalLM
from engine.models.registry import build_model
from engine.models.stage import Stage
from engine.ranks.group import OneRank, RankGroup
from engine.ranks.pipeline import Pipeline
from engine.speculation.step_cost import free_rows

QUANTIZED_BYTES = {"int8": 1.06, "int4": 0.63}  # of a weight with its share of scales, by --quantization


@dataclass(slots=True, frozen=True, kw_only=True)
class LoadedModel:
    """The weights on their device, and what follows from the model's files."""

    model: CausalLM
    spec: KVCacheSpec
    max_model_len: int  # tokens, prompt and answer
    eos_token_ids: tuple[int, ...]
    dtype: torch.dtype
    dtype_reason: str
    device: torch.device
    device_reason: str
    kernels: Kernels | None  # None: torch computes everything
    kernels_choice: Choice
    padding: Padding
    free_rows: float  # that a step multiplies while it reads the weights

    @property
    def window(self) -> int:
        """Tokens that the layer which sees the most sees, the new one included; 0: all."""
        return max(self.model.windows) if all(self.model.windows) else 0


def load_model(
    model_dir: Path, settings: EngineSettings, group: RankGroup | None = None, pipeline: Pipeline | None = None
) -> LoadedModel:
    """The part of a rank of `group`; the whole if that is None. `pipeline`: of one of its stages, which `group` shares.

    Raises `StartupError` with one line if the model cannot be served as set: a file or tensor is missing, the device
    is not there, memory does not suffice, the context is longer than the model allows, or the ranks cannot share it."""
    group = group or OneRank()
    pipeline = pipeline or Pipeline(Stage(), everybody=group)
    files = open_model(model_dir)
    chosen_device = choose_device(settings.device)
    device = _device(chosen_device.device)
    chosen = resolve_dtype(settings.dtype, model_dir, chosen_device.device, settings.kernels)
    dtype: torch.dtype = getattr(torch, chosen.dtype)
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    identity = model_identity(model_dir)
    kernels, kernels_choice = load_kernels(
        settings.kernels,
        device=device,
        dtype=dtype,
        cache_dir=settings.cache_dir,
        quantization=settings.quantization,
        model=identity,
    )
    max_model_len = longest_context(files, settings)
    token_ids = files.token_ids()
    ends = files.ends(token_ids)
    deals_experts = settings.expert_parallel_size > 1
    model = _load(
        files,
        group,
        pipeline,
        deals_experts,
        num_positions=max_model_len,
        dtype=dtype,
        device=device,
        kernels=kernels,
    )
    tp_rank, tp_size = model.kv_shard
    return LoadedModel(
        model=model,
        spec=KVCacheSpec(
            model_id=_weights_identity(identity, settings.quantization, model.kv_variant),
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            block_size=settings.block_size,
            dtype=chosen.dtype,
            num_planes=1 if model.latent_value_dim else 2,
            tp_size=tp_size,
            tp_rank=tp_rank,
        ),
        max_model_len=max_model_len,
        eos_token_ids=tuple(known_ends(ends, model.vocab_size)),
        dtype=dtype,
        dtype_reason=chosen.reason,
        device=device,
        device_reason=chosen_device.reason,
        kernels=kernels,
        kernels_choice=kernels_choice,
        padding=Padding(token_ids.values(), model.vocab_size, device),
        free_rows=_free_rows(files, settings, dtype=dtype, device=device, kernels=kernels),
    )


def _load(
    files: ModelFiles,
    group: RankGroup,
    pipeline: Pipeline,
    deals_experts: bool,
    *,
    num_positions: int,
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels | None,
) -> CausalLM:
    everybody = pipeline.everybody
    check_weights_fit(
        files,
        dtype=dtype,
        device=device,
        stays_quantised=kernels is not None,
        share=everybody.num_here / everybody.size,
    )
    everybody.all_gather(torch.zeros(1, device=device))  # no rank loads before all have looked at what memory is left
    try:
        with torch.inference_mode():
            model = build_model(
                files,
                num_positions=num_positions,
                dtype=dtype,
                device=device,
                group=group,
                deals_experts=deals_experts,
                stage=pipeline.stage,
            )
            model.load(files, kernels)
            model.finish(kernels)
    except torch.OutOfMemoryError as error:
        raise StartupError(f"the weights of {files.path} do not fit on {device}") from error
    return model


def _free_rows(
    files: ModelFiles, settings: EngineSettings, *, dtype: torch.dtype, device: torch.device, kernels: Kernels | None
) -> float:
    """How many rows of a step cost no more than reading the weights does. `engine.speculation` asks: a drafted
    token is a row."""
    size = QUANTIZED_BYTES.get(settings.quantization)
    if size is None:
        held = weight_bytes(files, dtype.itemsize, stays_quantised=kernels is not None)
        size = held / weight_bytes(files, 1, stays_quantised=False)
    kind = settings.quantization
    is_bfloat16 = kind == "int4" or (kind == "none" and dtype == torch.bfloat16)
    instruction_set = None if kernels is None else kernels.choice.instruction_set
    return free_rows(device.type, instruction_set, size, is_bfloat16=is_bfloat16)


def _weights_identity(identity: str, quantization: str, variant: str) -> str:
    """32 hex digits. KV of quantised weights, or of another `CausalLM.kv_variant`, is another model's: blocks are never
    exchanged with those of others."""
    if quantization == "none" and not variant:
        return identity
    return hashlib.blake2b(f"{identity} {quantization} {variant}".rstrip().encode(), digest_size=16).hexdigest()


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise StartupError(f"device {name!r} is unknown; --device takes auto, cpu, cuda or cuda:N") from error
    if device.type not in ("cpu", "cuda"):
        raise StartupError(f"device {name!r} is not supported; --device takes auto, cpu, cuda or cuda:N")
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise StartupError(f"device {name!r} is not there: this torch sees no CUDA device; take --device cpu")
        if (device.index or 0) >= torch.cuda.device_count():
            raise StartupError(f"device {name!r} is not there: this machine has {torch.cuda.device_count()}")
    return device
