"""Checkpoints whose matrices AWQ, GPTQ, compressed-tensors or the fp8 of transformers have quantised.

config.json says by `quantization_config` which of them; a matrix is then several tensors, named below its module. All
mean weight = scale * (code - zero), with scale and zero for a group of a row's weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from safetensors import safe_open

from common.errors import StartupError
from common.model_files import ModelFiles
from engine.kernels.grouped import GROUPS, Codes, GroupedRows, Layout, QuantizedTensor, Scales
from engine.loading.checkpoints.checkpoint import CheckpointTensor, readable

if TYPE_CHECKING:
    from engine.models.base import ConfigReader

log = logging.getLogger(__name__)

_AWQ, _GPTQ, _COMPRESSED, _FP8 = "awq", "gptq", "compressed-tensors", "fp8"
QUANTIZATION_KEYS = ("quantization_config", "compression_config")
METHODS = (_AWQ, _GPTQ, _COMPRESSED, _FP8)
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_MAX_FP8_SCALE = 128.0
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each 4 bits of a word hold

# Tensors of a module that say no more than config.json or the others do.
_SILENT = ("weight_shape", "input_scale", "input_zero_point", "input_global_scale")


class Scheme:
    """What config.json says about the quantisation. Raises `StartupError` that names what is not supported."""

    def __init__(self, config: ConfigReader) -> None:
        self.method = config.text("quant_method", "")
        if self.method not in METHODS:
            raise StartupError(
                f"config.json: quantization_config of {self.method or 'an unknown method'} is not supported; known are "
                f"{', '.join(METHODS)}; take another checkpoint of this model"
            )
        self.bits = config.integer("bits", 4) if self.method in (_AWQ, _GPTQ) else 8
        self.block: tuple[int, int] | None = None  # rows and columns of a matrix that share a scale
        self.zero_offset = 0  # that codes of zeros lack
        self.quantizes_activations = False
        if self.method == _AWQ and (self.bits != 4 or config.text("version", "gemm").lower() != "gemm"):
            raise self._refusal("AWQ other than 4 bits in version gemm")
        if self.method == _GPTQ:
            if self.bits not in (4, 8):
                raise self._refusal(f"GPTQ with {self.bits} bits")
            kind = config.text("checkpoint_format", "gptq")
            if kind not in ("gptq", "gptq_v2"):
                raise self._refusal(f"checkpoint_format {kind}")
            self.zero_offset = 1 if kind == "gptq" else 0
        if self.method == _COMPRESSED:
            self._read_compressed(config)
        if self.method == _FP8:
            self.quantizes_activations = True
            self.block = config.pair("weight_block_size")

    def _read_compressed(self, config: ConfigReader) -> None:
        form = config.text("format", "")
        if form not in _FORMATS:
            raise self._refusal(f"format {form!r}; known are {', '.join(_FORMATS)}; it")
        if config.section("kv_cache_scheme") is not None:
            raise self._refusal("kv_cache_scheme")
        sparsity = config.section("sparsity_config")
        if sparsity is not None and sparsity.text("format", "dense") != "dense":
            raise self._refusal("sparsity")
        groups = config.section("config_groups")
        bits: set[int] = set()
        for name in groups.keys() if groups is not None else ():
            section = groups.section(name) if groups is not None else None
            weights = None if section is None else section.section("weights")
            if section is None or weights is None:
                raise self._refusal(f"config group {name} without weights")
            if section.text("format", form) not in _FORMATS:
                raise self._refusal(f"format {section.text('format', form)!r}")
            bits.add(weights.integer("num_bits"))
            self.block = weights.pair("block_structure")
            self.quantizes_activations |= section.section("input_activations") is not None
        if not bits <= {4, 8}:
            raise self._refusal(f"weights of {', '.join(map(str, sorted(bits - {4, 8})))} bits")

    def _refusal(self, what: str) -> StartupError:
        return StartupError(f"config.json: quantization_config: {what} is not supported")


def scheme_of(config: Mapping[str, object]) -> Scheme | None:
    """None for a checkpoint that is not quantised."""
    from engine.models.base import ConfigReader

    sections = [ConfigReader(config).section(key) for key in QUANTIZATION_KEYS if config.get(key)]
    return Scheme(sections[0]) if sections and sections[0] is not None else None


class _Handle(Protocol):
    """A safetensors file that is open."""

    def get_tensor(self, name: str) -> torch.Tensor: ...


class _Rows(QuantizedTensor):
    """A matrix `[n, k]` of codes, with scale and zero for each of its groups."""

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, kind: Codes) -> None:
        """`codes` uint8 `[n, k]`, `scale` and `zero` float32 `[n, k / group]`; a `zero` of None is that of `kind`."""
        n, k = codes.shape
        self.shape = (n, k)
        self._codes = codes
        group = k // scale.shape[1]
        width = next((each for each in reversed(GROUPS) if group % each == 0), 0)
        if zero is not None and bool((zero == kind.below_zero).all()):
            zero = None
        self.layout = Layout(kind, Scales.SINGLE if zero is None else Scales.SINGLE_PAIR, width or group)
        factors = scale[..., None] if zero is None else torch.stack((scale, -zero * scale), -1)
        self._heads = factors.repeat_interleave(group // width, 1) if width else factors
        self.is_packable = width > 0

    def rows(self, start: int, stop: int) -> GroupedRows:
        heads = self._heads[start:stop].contiguous().view(torch.uint8)
        return GroupedRows(self.layout, self._codes[start:stop], heads)


def quantized_tensors(
    files: ModelFiles, scheme: Scheme, is_needed: Callable[[str], bool] = lambda _: True
) -> Iterator[CheckpointTensor]:
    """The tensors of the checkpoint whose names are needed, those of a quantised matrix as one, under the name of the
    matrix. Others are not read."""
    if scheme.quantizes_activations:
        log.info("the checkpoint asks for quantised activations; they stay in full precision, which is more exact")
    with ExitStack() as stack:
        where: dict[str, tuple[Path, _Handle]] = {}
        for file in files.weight_files:
            with readable(file):
                handle = stack.enter_context(safe_open(file, framework="pt"))
                where |= dict.fromkeys(handle.keys(), (file, handle))
        num_widened = 0
        for name, (file, handle) in where.items():
            module, _, leaf = name.rpartition(".")
            if _is_part(leaf, scheme) or (leaf == "weight_scale" or leaf == "weight_scale_inv"):
                continue
            weight = f"{module}.weight"
            is_packed = leaf in ("qweight", "weight_packed")
            if not is_needed(weight if is_packed else name):
                continue
            with readable(file):
                parts = _Module(files, module, where)
                if is_packed:
                    rows = parts.packed(leaf, scheme)
                else:
                    tensor = handle.get_tensor(name)
                    if leaf != "weight" or tensor.dtype not in (torch.int8, torch.float8_e4m3fn):
                        yield CheckpointTensor(file, name, tensor, tensor.nbytes)
                        continue
                    rows = parts.bytes_of(tensor, scheme)
            if isinstance(rows, _Rows) and rows.is_packable:
                yield CheckpointTensor(file, weight, rows, parts.num_bytes, f"{scheme.method} {rows.layout.codes.name}")
                continue
            num_widened += 1
            plain = rows if isinstance(rows, torch.Tensor) else rows.rows(0, rows.shape[0]).dequantize()
            yield CheckpointTensor(file, weight, plain, parts.num_bytes)
        if num_widened:
            log.warning(
                "some quantised weights have groups that the kernels do not compute (of other sizes than multiples of "
                "32, or in another order): they are widened",
                extra={"model": str(files.path), "weights": num_widened},
            )


def _is_part(leaf: str, scheme: Scheme) -> bool:
    if scheme.method in (_AWQ, _GPTQ):
        return leaf in ("qzeros", "scales", "g_idx")
    return leaf in ("weight_zero_point", "weight_g_idx", *_SILENT)


class _Module:
    """The tensors of one linear layer."""

    def __init__(self, files: ModelFiles, name: str, where: Mapping[str, tuple[Path, _Handle]]) -> None:
        self._files, self._name, self._where = files, name, where
        self.num_bytes = 0

    def _get(self, leaf: str) -> torch.Tensor:
        tensor = self._find(leaf)
        if tensor is None:
            raise StartupError(f"model {self._files.path} lacks tensor {self._name}.{leaf}; download it again")
        return tensor

    def _find(self, leaf: str) -> torch.Tensor | None:
        if f"{self._name}.{leaf}" not in self._where:
            return None
        file, handle = self._where[f"{self._name}.{leaf}"]
        with readable(file):
            tensor = handle.get_tensor(f"{self._name}.{leaf}")
        self.num_bytes += tensor.nbytes
        return tensor

    def _check(self, tensor: torch.Tensor, leaf: str, rows: int, columns: int | None) -> None:
        if tensor.dim() != 2 or tensor.shape[0] != rows or (columns is not None and tensor.shape[1] != columns):
            wanted = f"[{rows}, {'k / group' if columns is None else columns}]"
            raise StartupError(
                f"model {self._files.path}: tensor {self._name}.{leaf} has shape {list(tensor.shape)}, not {wanted}"
            )

    def packed(self, leaf: str, scheme: Scheme) -> _Rows | torch.Tensor:
        words = self._get(leaf)
        if words.dtype != torch.int32 or words.dim() != 2:
            raise StartupError(f"model {self._files.path}: tensor {self._name}.{leaf} is not a matrix of int32")
        if leaf == "weight_packed":
            return self._compressed(words)
        return self._awq(words) if scheme.method == _AWQ else self._gptq(words, scheme)

    def _awq(self, words: torch.Tensor) -> _Rows:
        """Codes `[k, n / 8]`, zeros `[k / group, n / 8]`, scales `[k / group, n]`."""
        order = torch.tensor(_AWQ_ORDER).argsort()

        def columns(packed: torch.Tensor) -> torch.Tensor:
            return _unpack(packed, 4).view(packed.shape[0], -1, 8)[..., order].flatten(1)

        k, n = words.shape[0], words.shape[1] * 8
        scale = self._get("scales")
        self._check(scale, "scales", scale.shape[0], n)
        zeros = self._get("qzeros")
        self._check(zeros, "qzeros", scale.shape[0], n // 8)
        self._check_groups(k, scale.shape[0], "scales")
        return _Rows(columns(words).T, scale.T.float(), columns(zeros).T.float(), Codes.BITS4)

    def _gptq(self, words: torch.Tensor, scheme: Scheme) -> _Rows | torch.Tensor:
        """Codes `[k / per word, n]`, zeros `[k / group, n / per word]`, scales `[k / group, n]`, and groups `[k]`."""
        per_word = 32 // scheme.bits
        k, n = words.shape[0] * per_word, words.shape[1]
        scale = self._get("scales")
        self._check(scale, "scales", scale.shape[0], n)
        packed = self._get("qzeros")
        self._check(packed, "qzeros", scale.shape[0], n // per_word)
        self._check_groups(k, scale.shape[0], "scales")
        codes = _unpack(words.T.contiguous(), scheme.bits)
        # Version 1 stores zeros less one; 0 less one wraps around.
        zeros = (_unpack(packed, scheme.bits).int() + scheme.zero_offset) & (2**scheme.bits - 1)
        kind = Codes.BITS4 if scheme.bits == 4 else Codes.BITS8
        scale, zero = scale.T.float(), zeros.T.float()
        groups = self._find("g_idx")
        if groups is not None and not torch.equal(groups.long(), torch.arange(k) // (k // scale.shape[1])):
            if groups.shape != (k,) or not 0 <= int(groups.min()) <= int(groups.max()) < scale.shape[1]:
                raise StartupError(f"model {self._files.path}: tensor {self._name}.g_idx does not fit its scales")
            columns = groups.long()
            plain: torch.Tensor = (codes.float() - zero[:, columns]) * scale[:, columns]
            return plain
        return _Rows(codes, scale, zero, kind)

    def _compressed(self, words: torch.Tensor) -> _Rows | torch.Tensor:
        """Codes `[n, k / per word]`, as unsigned; zeros `[n / per word, k / group]` likewise."""
        n, k = (int(size) for size in self._get("weight_shape"))
        bits = 8 * 4 * words.shape[1] // k
        if bits not in (4, 8) or k % (32 // bits):
            raise StartupError(
                f"model {self._files.path}: tensor {self._name}.weight_packed has shape {list(words.shape)} for a "
                f"matrix of [{n}, {k}]"
            )
        kind = Codes.BITS4 if bits == 4 else Codes.BITS8
        self._check(words, "weight_packed", n, k * bits // 32)
        scale = self._get("weight_scale")
        self._check(scale, "weight_scale", n, None)
        self._check_groups(k, scale.shape[1], "weight_scale")
        packed, zero = self._find("weight_zero_point"), None
        if packed is not None:
            zero = packed.float() + kind.below_zero if packed.dtype != torch.int32 else None
            if zero is None:
                zero = _unpack(packed.T.contiguous(), bits).T[:n].float()
            self._check(zero, "weight_zero_point", n, scale.shape[1])
        codes = _unpack(words, bits)
        groups = self._find("weight_g_idx")
        in_order = torch.arange(k) // (k // scale.shape[1])
        # -1 stands for no order.
        if groups is not None and int(groups.min()) >= 0 and not torch.equal(groups.long(), in_order):
            if groups.shape != (k,) or int(groups.max()) >= scale.shape[1]:
                raise StartupError(
                    f"model {self._files.path}: tensor {self._name}.weight_g_idx does not fit its scales"
                )
            offset = torch.full_like(scale, kind.below_zero) if zero is None else zero
            columns = groups.long()
            plain: torch.Tensor = (codes.float() - offset.float()[:, columns]) * scale.float()[:, columns]
            return plain
        return _Rows(codes, scale.float(), zero, kind)

    def bytes_of(self, weight: torch.Tensor, scheme: Scheme) -> _Rows:
        """int8 or fp8 `[n, k]`, with a scale for all, for a row, for groups of a row, or for square blocks."""
        n, k = weight.shape
        self.num_bytes += weight.nbytes
        inverse = self._find("weight_scale_inv")  # named so, but multiplied by
        leaf = "weight_scale" if inverse is None else "weight_scale_inv"
        scale = (self._get(leaf) if inverse is None else inverse).float()
        if scale.numel() == 1:
            scale = scale.reshape(1, 1)
        if scale.dim() == 1:
            scale = scale[:, None]
        height, width = scheme.block or (1 if scale.shape[0] == n else n, -(-k // scale.shape[-1]))
        if scale.shape != (-(-n // height), -(-k // width)) or (k % width and (width % 32 or k % 32)):
            raise StartupError(
                f"model {self._files.path}: tensor {self._name}.{leaf} has shape {list(scale.shape)} for a matrix of "
                f"[{n}, {k}]" + (f" in blocks of {list(scheme.block)}" if scheme.block else "")
            )
        scale = scale.repeat_interleave(height, 0)[:n]
        if k % width:  # the last block is not whole: scales for each 32
            scale = scale.repeat_interleave(width // 32, 1)[:, : k // 32]
        if weight.dtype == torch.int8:
            zero = self._find("weight_zero_point")
            if zero is not None:
                zero = (zero.float() + 128).reshape(n, -1).expand_as(scale)
            return _Rows(weight.view(torch.uint8) ^ 128, scale, zero, Codes.BITS8)
        if not float(scale.abs().max()) < _MAX_FP8_SCALE:
            raise StartupError(f"model {self._files.path}: tensor {self._name}.{leaf} has scales over {_MAX_FP8_SCALE}")
        return _Rows(weight.view(torch.uint8), scale, None, Codes.FP8)

    def _check_groups(self, k: int, groups: int, leaf: str) -> None:
        if groups < 1 or k % groups:
            raise StartupError(
                f"model {self._files.path}: tensor {self._name}.{leaf} has {groups} groups for {k} weights of a row"
            )


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes of an int32 matrix, the lowest bits of a word first: uint8 `[rows, columns * 32 / bits]`."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    return torch.stack((octets & 15, octets >> 4), -1).flatten(1)
