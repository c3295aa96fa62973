"""Layers that models are built from. Which implementation runs is decided here and nowhere else.

Weights lie in plain tensors, allocated on the device and filled by `engine.loading.weights`; `finish()` then turns each
layer into the form that computes fastest. No autograd, no modules: a call is its few tensor operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.kernels.grouped import PackedGrouped, PackedParts, QuantizedTensor
from engine.kernels.library import Activation, Kernels, PackedLinear, WeightKind
from engine.loading.checkpoints.part import Part

LinearKernel = Callable[[torch.Tensor], torch.Tensor]


class MatrixPlace(Protocol):
    """The place that a matrix of a checkpoint goes to. The matrix may be quantised, and may be packed as it is read."""

    @property
    def shape(self) -> tuple[int, int]: ...

    def plain(self) -> torch.Tensor:
        """Memory to be filled with a matrix that is not quantised, or is widened."""

    def pack(self, start: int, rows: torch.Tensor, kernels: Kernels) -> bool:
        """Packs rows of a plain matrix for the kernels, from number `start` on, instead of filling `plain`. `start` is
        a multiple of any panel. Returns False and does nothing if `finish` needs the plain matrix. A checkpoint packs
        either all its matrices so, or none."""

    def take(self, tensor: QuantizedTensor, kernels: Kernels) -> None:
        """Keeps a quantised matrix as it is, packed for the kernels. In place of filling `plain`."""


@dataclass(slots=True, frozen=True)
class PartPlace:
    """The place of a part of a checkpoint's tensor; the rest of it goes to other ranks."""

    place: torch.Tensor | MatrixPlace  # of the shape that the part has
    part: Part
    shape: tuple[int, ...]  # of the whole tensor

    def plain(self) -> torch.Tensor:
        """Memory to be filled with the part."""
        return self.place if isinstance(self.place, torch.Tensor) else self.place.plain()


Place = torch.Tensor | MatrixPlace | PartPlace


def place_of_part(place: Place, part: Part, size: int) -> Place:
    """`place` takes that part of a tensor which has `size` rows, or columns, in all."""
    if isinstance(place, PartPlace):
        raise TypeError("a part of a part")
    if part.is_all_of(size):
        return place
    shape = list(place.shape)
    shape[part.axis] = size
    return PartPlace(place, part, tuple(shape))


class Linear:
    """`x @ weight.T + bias`, `x` `[num_tokens, in_features]`.

    `weight` `[out_features, in_features]` can be filled until `finish()`, which may repack and drop it. `is_head`: it
    decides between tokens, or between experts.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        is_head: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.weight: torch.Tensor | None = torch.empty(out_features, in_features, dtype=dtype, device=device)
        self.bias: torch.Tensor | None = torch.empty(out_features, dtype=dtype, device=device) if bias else None
        self._is_head = is_head
        self._kernel: LinearKernel | None = None
        self._starts: set[int] = set()  # of the parts that are filled apart
        self._taken: dict[int, PackedGrouped] = {}  # rows that came quantised, by their first
        self.packed: PackedLinear | None = None  # what the kernels multiply by, if they do
        self.packed_below: float = math.inf  # tokens; from so many on another implementation is faster

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None = None, *, is_head: bool = False) -> Linear:
        """A layer on tensors that are filled already, and may belong to another layer too, as a tied embedding's."""
        linear = cls(0, 0, bias=False, is_head=is_head, dtype=weight.dtype, device=weight.device)
        linear.weight, linear.bias = weight, bias
        return linear

    @classmethod
    def packed_as(cls, packed: PackedLinear) -> Linear:
        """A layer that shares the packed weight of another layer or of an embedding."""
        linear = cls(0, 0, bias=False, dtype=torch.float32, device=torch.device("cpu"))
        linear.weight, linear.packed = None, packed
        return linear

    def rows(self, start: int, stop: int) -> Rows:
        """Some output rows of the weight, to be filled."""
        self._starts.add(start)
        return Rows(self, start, stop)

    def whole(self) -> Rows:
        """The weight, to be filled."""
        return Rows(self, 0, self._filled().shape[0])

    def pack(self, start: int, tensor: torch.Tensor, kernels: Kernels) -> bool:
        """Packs the rows from `start` on as they come, if none are needed plain and each part begins a panel."""
        weight = self._filled()
        if _torch_from_rows(weight, kernels) is not None or any(each % kernels.panel for each in self._starts):
            return False
        if self.packed is None:
            n, k = weight.shape
            self.packed = PackedLinear.empty(kernels, n, k, self._kind(weight, kernels))
        pack_rows(self.packed, start, tensor, weight.dtype)
        return True

    def _kind(self, weight: torch.Tensor, kernels: Kernels) -> WeightKind:
        return kernels.kind_of(weight, is_head=self._is_head)

    def take(self, start: int, tensor: QuantizedTensor, kernels: Kernels) -> None:
        self._taken[start] = PackedGrouped(kernels, tensor)

    def _filled(self) -> torch.Tensor:
        if self.weight is None:
            raise RuntimeError("the weight was repacked already")
        return self.weight

    def places(self, parts: Mapping[str, tuple[int, int] | None]) -> dict[str, Place]:
        """Where weight and bias of each of `parts` go, by its name; a part is a range of output rows, None all."""
        places: dict[str, Place] = {}
        for name, part in parts.items():
            places[f"{name}.weight"] = self.whole() if part is None else self.rows(*part)
            if self.bias is not None:
                places[f"{name}.bias"] = self.bias if part is None else self.bias[slice(*part)]
        return places

    def finish(self, kernels: Kernels | None) -> None:
        if self.weight is None:
            return
        if self.packed is not None:
            self.packed.set_bias(self.bias)
        elif self._taken and kernels is not None:
            self.packed = self._joined(kernels, self.weight)
        elif kernels is not None:
            self.packed = kernels.pack(self.weight, self.bias, self._kind(self.weight, kernels))
            from_rows = _torch_from_rows(self.weight, kernels)
            if from_rows is not None:
                self.packed_below = from_rows
        if self.packed is None or self.packed_below < math.inf:
            self._kernel = linear_kernel(self.weight, self.bias)
        self.weight = None

    def _joined(self, kernels: Kernels, weight: torch.Tensor) -> PackedLinear:
        """Rows that came quantised and, as float32, those between that did not."""
        parts: list[PackedLinear] = []
        at = 0
        for start, taken in [*sorted(self._taken.items()), (weight.shape[0], None)]:
            if at < start:
                parts.append(kernels.pack(weight[at:start].float(), None, WeightKind.FLOAT32))
            if taken is not None:
                parts.append(taken)
                at = start + taken.out_features
        at = 0
        for part in parts:
            part.set_bias(None if self.bias is None else self.bias[at : at + part.out_features])
            at += part.out_features
        self._taken.clear()
        return parts[0] if len(parts) == 1 else PackedParts(kernels, parts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.packed is not None and x.shape[0] < self.packed_below:
            return self.packed(x)
        if self._kernel is None:
            raise RuntimeError("finish() was not called")
        return self._kernel(x)


@dataclass(slots=True, frozen=True)
class Rows:
    """Output rows of a linear layer as a place for a checkpoint's matrix."""

    linear: Linear
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.stop - self.start, self.linear._filled().shape[1]

    def plain(self) -> torch.Tensor:
        return self.linear._filled()[self.start : self.stop]

    def pack(self, start: int, rows: torch.Tensor, kernels: Kernels) -> bool:
        return self.linear.pack(self.start + start, rows, kernels)

    def take(self, tensor: QuantizedTensor, kernels: Kernels) -> None:
        self.linear.take(self.start, tensor, kernels)


def pack_rows(packed: PackedLinear, start: int, rows: torch.Tensor, dtype: torch.dtype) -> None:
    """Fills the rows of `packed` from `start` on, rounded to `dtype`."""
    is_widened = rows.dtype == torch.bfloat16 and dtype == torch.float32  # by `fill`
    packed.fill(start, rows if is_widened else rows.to(dtype))


def _torch_from_rows(weight: torch.Tensor, kernels: Kernels) -> int | None:
    """The number of rows of x from which on torch's library multiplies faster; None for quantised weights."""
    if kernels.quantization != "none" or (weight.dtype == torch.bfloat16 and not _is_onednn_fast(weight)):
        return None
    return kernels.table.torch_from(str(weight.dtype).removeprefix("torch."), weight.numel())


def linear_kernel(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearKernel:
    """Torch's fastest way to multiply by this weight. It may keep `weight` itself, which must not change any more."""
    if _is_onednn_fast(weight):
        return _onednn_linear(weight, bias)

    def plain(x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight, bias)

    return plain


def _onednn_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearKernel:
    """Weights in oneDNN's own blocked layout. About twice as fast as F.linear at one token, equal from 512 on."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def onednn(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = multiply(x, packed, bias, "none", [], "")
        return result

    return onednn


def _is_onednn_fast(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16 and _onednn_packs(weight)


def _onednn_packs(weight: torch.Tensor) -> bool:
    """Whether this build and CPU have oneDNN's bfloat16 kernels. They are private to torch and may go away."""
    return (
        torch._C._has_mkldnn
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
        and weight.is_contiguous()
    )


class Embedding:
    """Rows of a matrix `[vocab_size, hidden_size]` by token id, times `scale` rounded to the dtype.

    `is_head_too`: the same matrix is the head's, so that it is packed for products if there are kernels.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        *,
        scale: float = 1.0,
        is_head_too: bool = False,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.weight: torch.Tensor | None = torch.empty(vocab_size, hidden_size, dtype=dtype, device=device)
        self.shape = (vocab_size, hidden_size)
        self.packed: PackedLinear | None = None  # in place of the weight, if that came quantised or is the head's too
        self._is_head_too = is_head_too
        self._dtype = dtype
        self._scale = None if scale == 1.0 else torch.tensor(scale, dtype=dtype, device=device)

    def plain(self) -> torch.Tensor:
        if self.weight is None:
            raise RuntimeError("the embedding is packed")
        return self.weight

    def pack(self, start: int, rows: torch.Tensor, kernels: Kernels) -> bool:
        if not self._is_head_too or kernels.quantization != "none":
            return False
        packed = self.packed
        if packed is None:
            if _torch_from_rows(self.plain(), kernels) is not None:
                return False
            packed = PackedLinear.empty(kernels, *self.shape, WeightKind.of(self._dtype))
            self.share(packed)
        pack_rows(packed, start, rows, self._dtype)
        return True

    def share(self, packed: PackedLinear) -> None:
        """Looks rows up in `packed` from now on, which holds the same numbers; the own weight goes."""
        self.packed, self.weight = packed, None

    def take(self, tensor: QuantizedTensor, kernels: Kernels) -> None:
        self.share(PackedGrouped(kernels, tensor))

    def __call__(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.packed is not None:
            rows = self.packed.look_up(token_ids).to(self._dtype)
        else:
            rows = F.embedding(token_ids, self.plain())
        return rows if self._scale is None else rows.mul_(self._scale)


class RMSNorm:
    """Root mean square norm over the last axis: float32 inside, rounded to the dtype, then times the weight.

    `from_one`: the weight that is filled in is a difference from 1, and the product with it is float32 too.
    """

    def __init__(
        self, size: int, eps: float, *, from_one: bool = False, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.weight = torch.empty(size, dtype=dtype, device=device)
        self._shape = (size,)
        self._from_one = from_one
        self.eps = eps

    def finish(self) -> None:
        """Called once, when the weight is filled."""
        if self._from_one:
            self.weight = self.weight.float() + 1

    def factors(self) -> torch.Tensor:
        """What a normed row is multiplied by, `[size]` float32; call `finish` first."""
        return self.weight.float()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        normed = F.rms_norm(x.float(), self._shape, None, self.eps)
        if self._from_one:
            return normed.mul_(self.weight).to(x.dtype)
        return normed.to(x.dtype).mul_(self.weight)


class RotaryEmbedding:
    """Rotary position embedding (arXiv 2104.09864), with the two halves of a head's rotary part as the pairs.

    Cosines and sines of all positions are computed once; a step gathers those of its tokens once for all layers.
    """

    def __init__(
        self, inv_freq: torch.Tensor, scale: float, num_positions: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        """`inv_freq` `[rotary_dim / 2]` float32, radians per position; `scale` is that of cosines and sines. What lies
        behind the first `rotary_dim` elements of a head is not rotated."""
        angles = torch.arange(num_positions, device=device)[:, None].float() * inv_freq.to(device)
        self.half_angles = (angles.cos() * scale, angles.sin() * scale)  # float32, each [num_positions, rotary_dim / 2]
        self._dtype = dtype
        self._half = inv_freq.shape[0]

    def angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines, each `[num_tokens, 1, rotary_dim]`, for `positions` `[num_tokens]`."""
        cos, sin = (each[positions].to(self._dtype) for each in self.half_angles)
        # The sign of "rotate half" sits in the table, so that a rotation is a swap of halves and a fused multiply-add.
        return torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]

    def rotate_(self, heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
        """Rotates `heads` `[num_tokens, num_heads, head_dim]` in place."""
        rotary = heads[..., : 2 * self._half]
        swapped = torch.roll(rotary, self._half, -1)
        torch.addcmul(rotary * cos, swapped, sin, out=rotary)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up` of `[num_tokens, 2 * intermediate_size]`, gate first."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`gelu(gate) * up` of `[num_tokens, 2 * intermediate_size]`, gate first; GELU by its approximation with tanh."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh").mul_(up)


ACTIVATE = {Activation.SILU: silu_and_mul, Activation.GELU_TANH: gelu_and_mul}
