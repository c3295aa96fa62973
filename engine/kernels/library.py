"""The kernels as Python calls them: ctypes, so that no version of torch is bound and the GIL is free meanwhile."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from ctypes import POINTER, Structure, byref, c_char_p, c_float, c_int, c_int32, c_int64, c_void_p
from enum import IntEnum
from functools import cache

import numpy as np
import torch

from common.cpu import read_cpu
from common.errors import StartupError
from engine.kernels.arena import Arena, Memory
from engine.kernels.build import library_file
from engine.kernels.choice import AUTO, TORCH, Choice, choose
from engine.kernels.table import SHIPPED, Table, TunedFor, load_tuned, tuned_file

log = logging.getLogger(__name__)

MAX_HEAD_DIM = 512  # of attention
DTYPES = (torch.float32, torch.bfloat16)  # of activations and KV


class WeightKind(IntEnum):
    """How a packed weight's elements are kept; the numbers are those of `Kind` in matmul.h."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8 = 2
    INT4 = 3
    GROUPED = 5  # as a file holds it: engine/kernels/grouped.py

    @classmethod
    def of(cls, dtype: torch.dtype) -> WeightKind:
        return cls.FLOAT32 if dtype == torch.float32 else cls.BFLOAT16


class Activation(IntEnum):
    """The activation of an MLP's gate; the numbers are those of `Activation` in layer.h."""

    SILU = 0
    GELU_TANH = 1


class LinearStruct(Structure):
    _fields_ = (
        ("packed", c_void_p),
        ("bias", c_void_p),
        ("n", c_int64),
        ("k", c_int64),
        ("kind", c_int32),
        ("layout", c_int32),
    )


class AttentionStruct(Structure):
    """The cache and the shape of its attention: `AttentionShape` of attention.h."""

    _fields_ = (
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("block_size", c_int32),
        ("block_stride", c_int64),
        ("layer_stride", c_int64),
        ("scale", c_float),
        ("soft_cap", c_float),
        ("window", c_int32),
        ("is_bf16", c_int32),
        ("cache", c_void_p),
        ("sinks", c_void_p),
    )


class BatchStruct(Structure):
    """The sequences of one step: `Batch` of attention.h, all arrays int32."""

    _fields_ = (
        ("num_sequences", c_int32),
        ("num_tokens", c_int32),
        ("num_before", c_void_p),
        ("num_new", c_void_p),
        ("table_starts", c_void_p),
        ("tables", c_void_p),
    )


class LayerStruct(Structure):
    """Weights of one layer of a decoder: `Layer` of layer.h. Norms are float32, None if the layer has none there."""

    _fields_ = (
        ("input_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("out_norm", c_void_p),
        ("down_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("qkv", LinearStruct),
        ("out", LinearStruct),
        ("gate_up", LinearStruct),
        ("down", LinearStruct),
        ("eps", c_float),
        ("rotary_dim", c_int32),
        ("activation", c_int32),
        ("padding", c_int32),
    )


class LayerCallStruct(Structure):
    """What a layer is computed with: `LayerCall` of kernels.cpp. `cos` and `sin` `[positions, rotary_dim / 2]` are
    float32 and contiguous, whatever weights and cache are. Keeps none of them alive."""

    _fields_ = (
        ("layer", POINTER(LayerStruct)),
        ("shape", POINTER(AttentionStruct)),
        ("cos", c_void_p),
        ("sin", c_void_p),
    )


_IDS = [("ids", "u8"), ("numbers", "u8"), ("count", "i8")]
ASKED = np.dtype(
    [
        *((name, _IDS) for name in ("penalised", "biased", "allowed", "banned", "bad")),
        ("mask", "u8"),
        ("uniform", "f8"),
        ("top_p", "f8"),
        *((name, "f4") for name in ("temperature", "min_p", "repetition", "presence", "frequency")),
        ("top_k", "i4"),
        ("num_top", "i4"),
    ],
    align=True,
)
"""What one row of logits is asked for: `Asked` of sample.h. Addresses of int64 token ids, of a float32 for each of them
(0: none), and how many they are."""

STRUCT_BYTES: Mapping[str, int] = {
    "Linear": ctypes.sizeof(LinearStruct),
    "AttentionShape": ctypes.sizeof(AttentionStruct),
    "Batch": ctypes.sizeof(BatchStruct),
    "Layer": ctypes.sizeof(LayerStruct),
    "LayerCall": ctypes.sizeof(LayerCallStruct),
    "Asked": ASKED.itemsize,
}
"""Of all structs that the kernels read or write, by their names in C++: as Python lays them out."""


class Kernels:
    """One variant's library, and the one team of threads that computes with it."""

    def __init__(
        self, choice: Choice, num_threads: int, quantization: str = "none", table: Table | None = None
    ) -> None:
        """`quantization` none, int8 or int4: what `kind_of` says of weights. `table`: the shipped one if None."""
        self.choice = choice
        self.table = SHIPPED if table is None else table
        self.quantization = quantization
        self.num_threads = num_threads
        self.library = _open(choice.instruction_set)
        self.team: int = self.library.baton_team(num_threads)
        self.arena = Arena()
        self.panel: int = 2 * self.library.baton_lanes()  # rows of a packed weight that lie together

    def kind_of(self, weight: torch.Tensor, *, is_head: bool = False) -> WeightKind:
        """How a layer's weight is kept. The head decides between tokens, so it has 8 bits at least."""
        if self.quantization == "none":
            return WeightKind.of(weight.dtype)
        return WeightKind.INT8 if is_head or self.quantization == "int8" else WeightKind.INT4

    def pack(self, weight: torch.Tensor, bias: torch.Tensor | None, kind: WeightKind | None = None) -> PackedLinear:
        packed = PackedLinear.of(self, weight, WeightKind.of(weight.dtype) if kind is None else kind)
        packed.set_bias(bias)
        return packed

    def attention(
        self,
        shape: AttentionStruct,
        batch: BatchStruct,
        layer: int,
        q: torch.Tensor,
        kv: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Writes `kv` `[num_tokens, 2, num_kv_heads, head_dim]`, then `q` `[num_tokens, num_heads, head_dim]` attends;
        both lie in rows of one tensor. `out` `[num_tokens, num_heads * head_dim]` is contiguous."""
        self.library.baton_attention(
            self.team,
            byref(shape),
            byref(batch),
            layer,
            q.data_ptr(),
            kv.data_ptr(),
            q.stride(0),
            q.dtype == torch.bfloat16,
            out.data_ptr(),
        )

    def layers(
        self, calls: ctypes.Array[LayerCallStruct], batch: BatchStruct, first: int, count: int, hidden: torch.Tensor
    ) -> None:
        """Layers number `first` and, in all, `count` of the array `calls`, over `hidden` `[num_tokens, hidden_size]`
        float32, contiguous, in place; a layer without gate_up ends after its attention."""
        self.library.baton_layers(self.team, calls, byref(batch), first, count, hidden.data_ptr())

    def half_layer(
        self,
        calls: ctypes.Array[LayerCallStruct],
        batch: BatchStruct,
        index: int,
        hidden: torch.Tensor,
        *,
        is_mlp: bool,
    ) -> torch.Tensor:
        """What attention, or the MLP, of layer `index` gives, like `hidden`, which stays as it is: not added yet, and
        before a norm that may follow. For a layer that several ranks share."""
        given = torch.empty_like(hidden)
        self.library.baton_half_layer(
            self.team, calls, byref(batch), index, is_mlp, hidden.data_ptr(), given.data_ptr()
        )
        return given

    def head(self, head: PackedLinear, norm: torch.Tensor, eps: float, hidden: torch.Tensor) -> torch.Tensor:
        """Logits `[num_tokens, vocab_size]` of `hidden`, before its last norm; all float32 and contiguous."""
        logits = torch.empty(hidden.shape[0], head.out_features)
        self._of_head(self.library.baton_head, head, norm, eps, hidden, logits.data_ptr())
        return logits

    def best_tokens(self, head: PackedLinear, norm: torch.Tensor, eps: float, hidden: torch.Tensor) -> torch.Tensor:
        """Where the largest of each row of what `head` would give first stands, `[num_tokens]` int64. A NaN counts as
        the largest, as torch's argmax has it."""
        tokens = torch.empty(hidden.shape[0], dtype=torch.int64)
        self._of_head(self.library.baton_best_tokens, head, norm, eps, hidden, tokens.data_ptr(), None)
        return tokens

    def _of_head(
        self,
        function: Callable[..., object],
        head: PackedLinear,
        norm: torch.Tensor,
        eps: float,
        hidden: torch.Tensor,
        *out: int | None,
    ) -> None:
        """`out`: the addresses that `function` writes to."""
        function(self.team, byref(head.struct), norm.data_ptr(), eps, hidden.data_ptr(), hidden.shape[0], *out)


class PackedLinear:
    """`x @ weight.T + bias` on a copy of the weight in the kernels' own layout.

    `weight` `[out_features, in_features]` and `x` `[num_tokens, in_features]` are float32 or bfloat16; the result has
    the dtype of `x`. What a row gives does not depend on the other rows.
    """

    def __init__(self, kernels: Kernels, memory: Memory | None, struct: LinearStruct) -> None:
        """`memory` is what `struct` points into."""
        self._kernels = kernels
        self.memory = memory  # None if others have it
        self._bias: torch.Tensor | None = None
        self.struct = struct
        self.out_features, self.in_features = int(struct.n), int(struct.k)
        self._reference = byref(struct)

    @classmethod
    def of(cls, kernels: Kernels, weight: torch.Tensor, kind: WeightKind) -> PackedLinear:
        if weight.dtype not in DTYPES:
            raise TypeError(f"no kernels for weights of {weight.dtype}")
        n, k = weight.shape
        packed = cls.empty(kernels, n, k, kind)
        packed.fill(0, weight)
        return packed

    @classmethod
    def empty(cls, kernels: Kernels, n: int, k: int, kind: WeightKind) -> PackedLinear:
        """A weight `[n, k]` whose rows are to be filled."""
        memory = kernels.arena.allocate(kernels.library.baton_packed_bytes(kind, n, k))
        return cls(kernels, memory, LinearStruct(memory.address, None, n, k, kind, 0))

    def fill(self, start: int, weight: torch.Tensor) -> None:
        """Packs `weight` `[num_rows, in_features]`, float32 or bfloat16, as the rows from `start` on. `start` has to
        be a multiple of `Kernels.panel`, and what else is in the panel of the last row is lost."""
        library, memory = self._kernels.library, self.memory
        if memory is None or start % self._kernels.panel:
            raise ValueError(f"rows from {start} on cannot be filled")
        to = memory.address + library.baton_packed_bytes(self.struct.kind, start, self.in_features)
        weight = weight.contiguous()
        is_bf16 = weight.dtype == torch.bfloat16
        library.baton_pack(
            self._kernels.team, self.struct.kind, weight.data_ptr(), is_bf16, weight.shape[0], self.in_features, to
        )

    def look_up(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Rows `[num_ids, in_features]` float32 for `row_ids` `[num_ids]` int64, of which each has to be a row. Only
        of kinds FLOAT32, BFLOAT16 and GROUPED."""
        row_ids = row_ids.contiguous()
        out = torch.empty(row_ids.shape[0], self.in_features)
        self._kernels.library.baton_look_up(
            self._kernels.team, self._reference, row_ids.data_ptr(), row_ids.shape[0], out.data_ptr()
        )
        return out

    def set_bias(self, bias: torch.Tensor | None) -> None:
        """`[out_features]`; before the first product."""
        self._bias = None if bias is None else bias.float().contiguous()
        self.struct.bias = None if self._bias is None else self._bias.data_ptr()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype not in DTYPES or x.shape[1] != self.in_features:
            raise TypeError(f"a linear layer of {self.in_features} inputs got {list(x.shape)} {x.dtype}")
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(x.shape[0], self.out_features, dtype=x.dtype)
        is_bf16 = x.dtype == torch.bfloat16
        self._kernels.library.baton_linear(
            self._kernels.team,
            self._reference,
            x.data_ptr(),
            x.stride(0),
            is_bf16,
            x.shape[0],
            out.data_ptr(),
            is_bf16,
        )
        return out


class PackedMLPs:
    """MLPs with gates, such as the experts of a layer: `down(activation(gates) * up)`, computed in one call."""

    def __init__(
        self,
        kernels: Kernels,
        gate_ups: Sequence[PackedLinear],
        downs: Sequence[PackedLinear],
        activation: Activation,
    ) -> None:
        """`gate_ups` have `[2 * inner_size, hidden_size]`, the gates first, and `downs` `[hidden_size, inner_size]`."""
        self._kernels = kernels
        self._linears = (*gate_ups, *downs)  # what the structs point into
        self._gate_ups, self._downs = (
            (LinearStruct * len(all_))(*(one.struct for one in all_)) for all_ in (gate_ups, downs)
        )
        self._activation = activation
        self._in_features, self._out_features = gate_ups[0].in_features, downs[0].out_features

    def __call__(self, x: torch.Tensor, num_rows: torch.Tensor) -> torch.Tensor:
        """`x` `[num_tokens, hidden_size]` float32, contiguous: the first rows are for the first MLP, as many as
        `num_rows` `[num_mlps]` int64 says, the next for the second. The result is like it."""
        if x.dtype != torch.float32 or x.shape[1] != self._in_features or not x.is_contiguous():
            raise TypeError(f"MLPs of {self._in_features} inputs got {list(x.shape)} {x.dtype}")
        if num_rows.dtype != torch.int64 or num_rows.shape != (len(self._downs),) or int(num_rows.sum()) != len(x):
            raise ValueError(f"{len(x)} rows are not those that {len(self._downs)} MLPs shall have")
        out = torch.empty(x.shape[0], self._out_features)
        self._kernels.library.baton_mlps(
            self._kernels.team,
            self._gate_ups,
            self._downs,
            self._activation,
            num_rows.data_ptr(),
            len(num_rows),
            x.data_ptr(),
            out.data_ptr(),
        )
        return out


@cache
def _open(variant: str) -> ctypes.CDLL:
    library = ctypes.CDLL(str(library_file(variant)))
    signatures: dict[str, tuple[object, tuple[object, ...]]] = {
        "baton_team": (c_void_p, (c_int,)),
        "baton_team_end": (None, (c_void_p,)),
        "baton_lanes": (c_int, ()),
        "baton_struct_bytes": (c_int64, (c_char_p,)),
        "baton_packed_bytes": (c_int64, (c_int, c_int64, c_int64)),
        "baton_pack": (None, (c_void_p, c_int, c_void_p, c_int, c_int64, c_int64, c_void_p)),
        "baton_grouped_bytes": (c_int64, (c_int, c_int64, c_int64)),
        "baton_pack_grouped": (
            None,
            (c_void_p, c_int, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p),
        ),
        "baton_look_up": (None, (c_void_p, POINTER(LinearStruct), c_void_p, c_int64, c_void_p)),
        "baton_linear": (
            None,
            (c_void_p, POINTER(LinearStruct), c_void_p, c_int64, c_int, c_int64, c_void_p, c_int),
        ),
        "baton_layers": (
            None,
            (c_void_p, POINTER(LayerCallStruct), POINTER(BatchStruct), c_int, c_int, c_void_p),
        ),
        "baton_half_layer": (
            None,
            (c_void_p, POINTER(LayerCallStruct), POINTER(BatchStruct), c_int, c_int, c_void_p, c_void_p),
        ),
        "baton_mlps": (
            None,
            (
                *(c_void_p, POINTER(LinearStruct), POINTER(LinearStruct)),
                *(c_int, c_void_p, c_int64, c_void_p, c_void_p),
            ),
        ),
        "baton_head": (
            None,
            (c_void_p, POINTER(LinearStruct), c_void_p, c_float, c_void_p, c_int64, c_void_p),
        ),
        "baton_best_tokens": (
            None,
            (c_void_p, POINTER(LinearStruct), c_void_p, c_float, c_void_p, c_int64, c_void_p, c_void_p),
        ),
        "baton_sample": (
            None,
            (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_void_p),
        ),
        "baton_attention": (
            None,
            (
                *(c_void_p, POINTER(AttentionStruct), POINTER(BatchStruct)),
                *(c_int, c_void_p, c_void_p, c_int64, c_int, c_void_p),
            ),
        ),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    check_structs(variant, library.baton_struct_bytes, STRUCT_BYTES)
    _opened.append(library)
    return library


_opened: list[ctypes.CDLL] = []
_COMPUTING = ("look_up", "linear", "layers", "half_layer", "mlps", "head", "best_tokens", "sample", "attention")


@contextmanager
def named_calls(named: Callable[[str], AbstractContextManager[object]]) -> Iterator[None]:
    """Meanwhile, each call of a kernel runs inside `named(its name)`. A profiler does not see them by itself."""

    def around(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def named_call(*arguments: object) -> None:
            with named(name):
                call(*arguments)

        return named_call

    libraries = list(_opened)
    plain = [{name: getattr(library, name) for name in map("baton_{}".format, _COMPUTING)} for library in libraries]
    for library, calls in zip(libraries, plain, strict=True):
        vars(library).update({name: around(name, call) for name, call in calls.items()})
    try:
        yield
    finally:
        for library, calls in zip(libraries, plain, strict=True):
            vars(library).update(calls)


def check_structs(variant: str, bytes_of: Callable[[bytes], int], expected: Mapping[str, int]) -> None:
    """Raises `StartupError` if a struct of the library, asked for by name, has another size than Python gives it: the
    kernels would read other fields than those that were written."""
    sizes = {name: (bytes_of(name.encode()), size) for name, size in expected.items()}
    if wrong := [f"{name} has {theirs} bytes, not {ours}" for name, (theirs, ours) in sizes.items() if theirs != ours]:
        raise StartupError(f"the kernels for {variant} do not fit engine/kernels/library.py: {'; '.join(wrong)}")


@cache
def _kernels(choice: Choice, num_threads: int, quantization: str, table: Table) -> Kernels:
    """One team per number of threads, for the life of the process."""
    return Kernels(choice, num_threads, quantization, table)


def load_kernels(
    wanted: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    cache_dir: str,
    quantization: str = "none",
    model: str = "",
) -> tuple[Kernels | None, Choice]:
    """The kernels for this device and dtype, or None for torch, with as many threads as torch computes with; and why.

    `cache_dir` may hold what `baton doctor --tune` found for `model`, as `model_identity` names it.

    Logs which and why. Raises `StartupError` as `choose_kernels` does.
    """
    choice, table = choose_kernels(
        wanted, device=device, dtype=dtype, cache_dir=cache_dir, quantization=quantization, model=model
    )
    if device.type != "cpu":
        return None, choice
    tuned = {"tuned_in": table.file} if table.file else {}
    log.info("kernels", extra={"kernels": choice.instruction_set, "reason": choice.reason, **tuned})
    is_used = choice.instruction_set != TORCH
    return _kernels(choice, torch.get_num_threads(), quantization, table) if is_used else None, choice


def choose_kernels(
    wanted: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    cache_dir: str | None,
    quantization: str = "none",
    model: str = "",
) -> tuple[Choice, Table]:
    """What computes on this device in this dtype, and which products are torch's. What was tuned for `model` goes
    before what is shipped for this kind of CPU; on a kind that is unknown, what was measured once decides between
    variants. Only what is shipped counts if `cache_dir` is None.

    Raises `StartupError` if `wanted`, the setting `kernels`, names a variant that cannot run here, if weights shall be
    quantised and there are no kernels for that, or if the file of what was tuned is broken.
    """
    if device.type != "cpu":
        if quantization != "none":
            raise StartupError(f"--quantization {quantization} needs --device cpu")
        if wanted not in (AUTO, TORCH):
            raise StartupError(f"--kernels {wanted} needs --device cpu: on {device} they would not be used")
        return Choice(TORCH, "the kernels are for CPUs"), SHIPPED
    choice = choose(wanted)
    if dtype not in DTYPES:
        choice = Choice(TORCH, f"there are none for {dtype}")
    if quantization != "none" and choice.instruction_set == TORCH:
        raise StartupError(f"--quantization {quantization} needs the CPU kernels: {choice.reason}")
    if choice.instruction_set == TORCH or cache_dir is None:
        return choice, SHIPPED
    cpu, dtype_name = read_cpu(), str(dtype).removeprefix("torch.")
    tuned = load_tuned(cache_dir, TunedFor(cpu.kind or cpu.name, model, dtype_name, quantization))
    if tuned is not None and tuned.instruction_set in (choice.instruction_set, *choice.slower):
        file = tuned_file(cache_dir)
        if tuned.instruction_set != choice.instruction_set:
            choice = Choice(tuned.instruction_set, f"tuned for this model on this kind of CPU ({file})")
        return choice, Table(tuned.rules, str(file))
    if choice.rivals:
        from engine.kernels.trial import tried  # which needs this module

        choice = tried(choice, cpu, dtype_name if quantization == "none" else quantization, cache_dir)
    return choice, SHIPPED
