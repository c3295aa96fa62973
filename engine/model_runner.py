"""Runs the model: weights and KV cache on one device, one forward pass per engine step."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from common.config import EngineSettings
from common.errors import InternalError, StartupError
from common.model_files import ModelFiles, model_identity, open_model, read_safetensors_header
from common.sampling import SamplingParams
from common.types import KVCacheSpec, SampledToken
from engine.attention.base import AttentionShape
from engine.attention.registry import attention_backend
from engine.batch import Pooled, SampleInput, Scored, SequenceInput, StepOutput
from engine.blocks.host_memory import available_bytes
from engine.checkpoints.gguf_file import read_gguf
from engine.checkpoints.gguf_tensors import PLAIN
from engine.device import choose_device
from engine.device_copies import read, to_device
from engine.dtype import resolve_dtype
from engine.kernels.library import load_kernels
from engine.models.base import CausalLM
from engine.models.registry import build_model, is_read, max_positions
from engine.models.transformers_model import is_mxfp4
from engine.prompt_scores import score_tokens
from engine.sampler import sample, wants_likeliest
from engine.speculation.step_cost import free_rows
from kv_store.host_pages import prepare_pages

log = logging.getLogger(__name__)

GIB = 1 << 30
_CODES = {"I32": 8, "I8": 1, "F8_E4M3": 1}  # weights that an element of a quantised checkpoint holds
_MXFP4_CODES = {"_blocks": 2, "_scales": 0}  # the same in experts of mxfp4, which are always widened: by end of name
QUANTIZED_BYTES = {"int8": 1.06, "int4": 0.63}  # of a weight with its share of scales, by --quantization
WARM_UP_TOKENS = 64
DEFAULT_CPU_KV_CACHE_GB = 1.0
_CPU_RESERVE_BYTES = 256 << 20  # activations, workspaces, Python
_CUDA_RESERVE_BYTES = 1 << 30  # the same on a device, kernels' workspaces included


def _nothing() -> None:
    """Default of `between_layers`."""


class ModelRunner:
    """`kv_cache` is `[num_blocks, *spec.block_shape]`, in the dtype that was chosen."""

    spec: KVCacheSpec
    kv_cache: torch.Tensor
    num_blocks: int
    max_model_len: int  # tokens, prompt and answer
    vocab_size: int
    hidden_size: int
    window: int  # tokens that the layer which sees the most sees, the new one included; 0: all
    eos_token_ids: list[int]
    dtype_reason: str
    device_reason: str

    def __init__(self, model_dir: Path, settings: EngineSettings, *, attention: str | None = None) -> None:
        """Loads the weights and allocates the KV cache. `attention` names a backend; the device's fastest if None.

        Raises `StartupError` with one line if the model cannot be served as set: a file or tensor is missing, the
        device is not there, memory does not suffice, or the context is longer than the model or the cache allows.
        """
        files = open_model(model_dir)
        chosen_device = choose_device(settings.device)
        self.device = _device(chosen_device.device)
        self.device_reason = chosen_device.reason
        chosen = resolve_dtype(settings.dtype, model_dir, chosen_device.device, settings.kernels)
        self.dtype_reason = chosen.reason
        self.dtype: torch.dtype = getattr(torch, chosen.dtype)
        if settings.num_threads is not None:
            torch.set_num_threads(settings.num_threads)
        self._kernels = load_kernels(
            settings.kernels,
            device=self.device,
            dtype=self.dtype,
            cache_dir=settings.cache_dir,
            quantization=settings.quantization,
        )
        self.free_rows = self._free_rows(files, settings)
        self.max_model_len = _max_model_len(files, settings)
        self.eos_token_ids = files.eos_token_ids
        self._model = self._load(files)
        self.vocab_size = self._model.vocab_size
        self.hidden_size = self._model.hidden_size
        self.window = max(self._model.windows) if all(self._model.windows) else 0
        self.spec = KVCacheSpec(
            model_id=_weights_identity(model_dir, settings.quantization, self._model.kv_variant),
            num_layers=self._model.num_layers,
            num_kv_heads=self._model.num_kv_heads,
            head_dim=self._model.head_dim,
            block_size=settings.block_size,
            dtype=chosen.dtype,
            num_planes=1 if self._model.latent_value_dim else 2,
        )
        self.num_blocks = self._num_blocks(settings)
        self.max_model_len = _fit_max_model_len(self.max_model_len, self.num_blocks, settings)
        self.kv_cache = torch.empty((self.num_blocks, *self.spec.block_shape), dtype=self.dtype, device=self.device)
        prepare_pages(self.kv_cache)
        shape = AttentionShape(
            num_heads=self._model.num_heads,
            softmax_scale=self._model.softmax_scale,
            windows=self._model.windows,
            soft_cap=self._model.soft_cap,
            value_dim=self._model.latent_value_dim,
            sinks=self._model.sinks,
        )
        self._attention = attention_backend(self.kv_cache, self.spec, shape, attention, self._kernels)
        log.info(
            "model ready",
            extra={
                "num_blocks": self.num_blocks,
                "max_model_len": self.max_model_len,
                "device": str(self.device),
                "device_reason": self.device_reason,
                "dtype": chosen.dtype,
                "dtype_reason": chosen.reason,
            },
        )

    @torch.inference_mode()
    def execute(
        self,
        sequences: Sequence[SequenceInput],
        between_layers: Callable[[], None] = _nothing,
    ) -> list[StepOutput]:
        """One engine step: computes all new tokens, samples and scores if asked.

        The result has one entry per sequence, None if it asked for nothing. `between_layers` is called after each
        layer, or after some short ones; it may not touch this runner.
        """
        result: list[StepOutput] = [None] * len(sequences)
        wanted, states, pooled, scores = self._forward(sequences, between_layers)
        for index, one in pooled.items():
            result[index] = one
        inputs = [item for index in wanted if (item := sequences[index].sample) is not None]
        if states is not None:
            for index, token in zip(wanted, self._sample(states, inputs), strict=True):
                result[index] = Scored(scores[index], token) if index in scores else token
        for index, scored in scores.items():
            if sequences[index].sample is None:
                result[index] = Scored(scored, None)
        return result

    def warm_up(self) -> None:
        """Computes a prompt, a token after it and a token after the longest context, so that no request waits for what
        happens once: choosing kernels, allocating workspaces."""
        num_tokens = min(WARM_UP_TOKENS, self.num_blocks * self.spec.block_size - 1, self.max_model_len - 1)
        blocks = list(range(-(-(num_tokens + 1) // self.spec.block_size)))
        longest = [0] * -(-self.max_model_len // self.spec.block_size)
        sample = SampleInput(params=SamplingParams(temperature=0.0), num_output_tokens=0)
        for start, token_ids, block_ids in (
            (0, [0] * num_tokens, blocks),
            (num_tokens, [0], blocks),
            (self.max_model_len - 1, [0], longest),
        ):
            self.execute(
                [SequenceInput(token_ids=token_ids, num_computed_tokens=start, block_ids=block_ids, sample=sample)]
            )

    def _forward(
        self, sequences: Sequence[SequenceInput], between_layers: Callable[[], None]
    ) -> tuple[list[int], torch.Tensor | None, dict[int, Pooled], dict[int, list[SampledToken]]]:
        """Indexes of the sequences that want a token, hidden states of their last tokens `[that many, hidden_size]` in
        that order, and pooled states and scores of those that want them."""
        if not sequences:
            return [], None, {}, {}
        # Decodes first, by length: attention then sees neighbours that it can compute together.
        order = sorted(range(len(sequences)), key=lambda i: _attention_order(sequences[i]))
        token_ids: list[int] = []
        starts: list[int] = []
        counts: list[int] = []
        wanted: list[int] = []
        last_tokens: list[int] = []
        ends: dict[int, int] = {}
        for index in order:
            sequence = sequences[index]
            self._check(sequence)
            token_ids += sequence.token_ids
            starts.append(sequence.num_computed_tokens)
            counts.append(len(sequence.token_ids))
            if sequence.num_pooled or sequence.score is not None:
                ends[index] = len(token_ids)
            if sequence.sample is not None:
                wanted.append(index)
                last_tokens.append(len(token_ids) - 1)
        step = self._attention.prepare([sequences[index] for index in order])
        inputs = (to_device(token_ids, self.device), to_device(_positions(starts, counts), self.device))
        hidden = self._model.forward(*inputs, step, between_layers)
        pooled: dict[int, torch.Tensor] = {}
        scores: dict[int, list[SampledToken]] = {}
        for index, end in ends.items():
            sequence = sequences[index]
            if sequence.num_pooled:
                pooled[index] = self._pool(hidden[end - sequence.num_pooled : end])
            if sequence.score is not None:
                own = hidden[end - len(sequence.token_ids) : end]
                scores[index] = score_tokens(own, sequence.score, self._model, between_layers)
        totals = dict(zip(pooled, map(Pooled, read(list(pooled.values()))), strict=True)) if pooled else {}
        if not wanted:
            return [], None, totals, scores
        if len(wanted) < len(token_ids):
            hidden = hidden[to_device(last_tokens, self.device)]
        return wanted, hidden, totals, scores

    def _sample(self, states: torch.Tensor, inputs: Sequence[SampleInput]) -> list[SampledToken | None]:
        """A token for each row of `states`. If all want the likeliest one and nothing else, no logits are kept."""
        if not all(wants_likeliest(item) for item in inputs):
            return sample(self._model.logits(states), inputs, self._kernels)
        if all(item.guide is None for item in inputs):
            return [SampledToken(token_id) for token_id in self._read_ids(self._model.best_tokens(states))]
        logits, best = self._model.logits_and_best(states)
        return sample(logits, inputs, self._kernels, self._read_ids(best))

    @staticmethod
    def _read_ids(token_ids: torch.Tensor) -> list[int]:
        (values,) = read([token_ids])
        return list(map(int, values))

    def _pool(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.last_states(hidden).float().sum(dim=0)

    def _check(self, sequence: SequenceInput) -> None:
        end = sequence.num_computed_tokens + len(sequence.token_ids)
        if not sequence.token_ids or end > self.max_model_len:
            raise InternalError(f"a step has {len(sequence.token_ids)} new tokens up to {end} of {self.max_model_len}")
        if len(sequence.block_ids) * self.spec.block_size < end:
            raise InternalError(f"a step has {len(sequence.block_ids)} blocks for {end} tokens")

    def _load(self, files: ModelFiles) -> CausalLM:
        self._check_weights_fit(files)
        try:
            with torch.inference_mode():
                model = build_model(files, num_positions=self.max_model_len, dtype=self.dtype, device=self.device)
                model.load(files, self._kernels)
                model.finish(self._kernels)
        except torch.OutOfMemoryError as error:
            raise StartupError(f"the weights of {files.path} do not fit on {self.device}") from error
        return model

    def _check_weights_fit(self, files: ModelFiles) -> None:
        available = available_bytes() if self.device.type == "cpu" else None
        if available is None:
            return
        needed = weight_bytes(files, self.dtype.itemsize, stays_quantised=self._kernels is not None)
        if needed > available:
            raise StartupError(
                f"the weights of {files.path} need {needed / GIB:.1f} GiB in {self.dtype}, "
                f"{available / GIB:.1f} GiB are available; take a smaller --model or --dtype bfloat16"
            )

    def _free_rows(self, files: ModelFiles, settings: EngineSettings) -> float:
        """How many rows of a step cost no more than reading the weights does. `engine.speculation` asks: a drafted
        token is a row."""
        size = QUANTIZED_BYTES.get(settings.quantization)
        if size is None:
            held = weight_bytes(files, self.dtype.itemsize, stays_quantised=self._kernels is not None)
            size = held / weight_bytes(files, 1, stays_quantised=False)
        kind = settings.quantization
        is_bfloat16 = kind == "int4" or (kind == "none" and self.dtype == torch.bfloat16)
        instruction_set = None if self._kernels is None else self._kernels.choice.instruction_set
        return free_rows(self.device.type, instruction_set, size, is_bfloat16=is_bfloat16)

    def _num_blocks(self, settings: EngineSettings) -> int:
        if self.device.type == "cpu":
            available, flag = available_bytes(), "--kv-cache-memory-gb"
            room = None if available is None else available - _CPU_RESERVE_BYTES
            wanted = (settings.kv_cache_memory_gb or DEFAULT_CPU_KV_CACHE_GB) * GIB
        else:
            free, total = torch.cuda.mem_get_info(self.device)
            flag = "--memory-utilization" if settings.kv_cache_memory_gb is None else "--kv-cache-memory-gb"
            room = free - _CUDA_RESERVE_BYTES
            # Of this process alone: others of a stack have shares of their own on the same device.
            own = torch.cuda.memory_reserved(self.device)
            share = total * settings.memory_utilization - own - _CUDA_RESERVE_BYTES
            wanted = share if settings.kv_cache_memory_gb is None else settings.kv_cache_memory_gb * GIB
        if settings.num_blocks is not None:
            wanted, flag = settings.num_blocks * self.spec.block_bytes, "--num-blocks"
        if room is not None and wanted > room:
            raise StartupError(
                f"the KV cache needs {wanted / GIB:.2f} GiB, {max(room, 0) / GIB:.2f} GiB are available on "
                f"{self.device}; lower {flag}"
            )
        num_blocks = int(wanted // self.spec.block_bytes)
        if num_blocks < 1:
            raise StartupError(
                f"the KV cache has {max(wanted, 0) / GIB:.3f} GiB, less than one block of "
                f"{self.spec.block_bytes} bytes; raise {flag}"
            )
        return num_blocks


def _weights_identity(model_dir: Path, quantization: str, variant: str) -> str:
    """32 hex digits. KV of quantised weights, or of another `CausalLM.kv_variant`, is another model's: blocks are never
    exchanged with those of others."""
    identity = model_identity(model_dir)
    if quantization == "none" and not variant:
        return identity
    return hashlib.blake2b(f"{identity} {quantization} {variant}".rstrip().encode(), digest_size=16).hexdigest()


def weight_bytes(files: ModelFiles, itemsize: int, *, stays_quantised: bool = True) -> int:
    """Bytes that the checkpoint's tensors take with `itemsize` bytes per element; quantised ones as many as in the
    file, unless they are widened. Those that nobody reads take none, such as a vision tower."""
    total = 0
    if files.is_gguf:
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


def _attention_order(sequence: SequenceInput) -> tuple[bool, int]:
    return len(sequence.token_ids) > 1, sequence.num_computed_tokens


def _positions(starts: list[int], counts: list[int]) -> list[int] | torch.Tensor:
    """The position of each new token in its own sequence, of which `counts` begin at `starts`."""
    if max(counts) == 1:
        return starts  # of single tokens a list is the fastest
    first, count = np.array(starts), np.array(counts)
    ends = count.cumsum()
    return torch.from_numpy(np.arange(ends[-1]) + np.repeat(first + count - ends, count))


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


def _max_model_len(files: ModelFiles, settings: EngineSettings) -> int:
    limit = max_positions(files)
    if settings.max_model_len is None:
        return limit
    if settings.max_model_len > limit:
        raise StartupError(
            f"--max-model-len {settings.max_model_len} is more than the {limit} positions of {files.path}"
        )
    return settings.max_model_len


def _fit_max_model_len(max_model_len: int, num_blocks: int, settings: EngineSettings) -> int:
    """Limits the context so that one request of the full length fits into the cache: otherwise it could never
    finish."""
    capacity = num_blocks * settings.block_size
    if capacity >= max_model_len:
        return max_model_len
    if settings.max_model_len is not None:
        raise StartupError(
            f"a KV cache of {num_blocks} blocks holds {capacity} tokens, less than --max-model-len {max_model_len}; "
            "lower it or raise --num-blocks or --kv-cache-memory-gb"
        )
    log.warning(
        "the KV cache is smaller than the model's context, shortening the context",
        extra={"max_model_len": capacity, "model_positions": max_model_len},
    )
    return capacity
