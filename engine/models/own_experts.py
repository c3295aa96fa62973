"""Baton's experts in the place of transformers', in models that run on transformers' code. Routers stay transformers'.

transformers computes most mixtures through one interface (`transformers.integrations.moe`): a module has all experts'
weights in two tensors, and flags that say how they lie there.
"""

from __future__ import annotations

import torch
from torch import nn

from common.errors import InternalError
from common.process.allocator import give_back_freed
from engine.kernels.library import Activation, Kernels
from engine.layers import Linear
from engine.models.experts import ExpertMLPs, Gate
from engine.models.shard import Span
from engine.ranks.dealt_experts import DealtExperts

_INTERFACE = "transformers.integrations.moe"


class OwnExperts(nn.Module):
    """Stands in the place of a module of that interface."""

    def __init__(self, mlps: ExpertMLPs, num_experts: int) -> None:
        """`num_experts` of the model: `mlps` may be some of them."""
        super().__init__()
        self.mlps = mlps
        self.num_experts = num_experts
        self.dealt: DealtExperts | None = None  # if other ranks have the others; None: what these give is all
        self._like: tuple[int, torch.dtype, int] | None = None  # of the last call: width and dtype, experts per token

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        self._like = hidden_states.shape[1], hidden_states.dtype, top_k_index.shape[1]
        if self.dealt is None:
            return self.mlps(hidden_states, top_k_index, top_k_weights)
        return self.dealt(self.mlps, hidden_states, top_k_index, top_k_weights)

    def compute_for_others(self) -> None:
        """Of a step of which this data rank has no row. It was called before, with rows."""
        if self._like is None:
            raise InternalError("experts do not know yet what tokens look like")
        width, dtype, per_token = self._like
        nobody = torch.empty((0, per_token))
        self(torch.empty((0, width), dtype=dtype), nobody.long(), nobody)


def is_experts(module: nn.Module) -> bool:
    """Whether the module is one of the interface that `own_experts` takes: with gates, and no norm behind experts."""
    flags = vars(module)
    return (
        flags.get("has_gate") is True
        and flags.get("has_post_expert_norm") is False
        and {"has_bias", "is_transposed", "is_concatenated"} <= flags.keys()
        and hasattr(module, "_apply_gate")
        and all(_weight(module, name).dim() == 3 for name in ("gate_up_proj", "down_proj"))
    )


def experts_of(base: nn.Module) -> list[tuple[nn.Module, list[str]]]:
    """Those that `own_experts` takes, each by its parent and its name there, in a list."""
    return [
        (parent, [name]) for parent in base.modules() for name, child in parent.named_children() if is_experts(child)
    ]


def own_experts(module: nn.Module, kernels: Kernels | None, span: Span | None = None) -> OwnExperts:
    """Experts of ours for a module that `is_experts`; `span`: which of the model's it has, all if it is None. It loses
    its weights, one tensor after the other, so that no more than one is in memory twice."""
    gate_ups, downs = (_packed(module, name, kernels) for name in ("gate_up_proj", "down_proj"))
    mlps = ExpertMLPs(gate_ups, downs, _gate(module), span=span)
    mlps.finish(kernels)
    return OwnExperts(mlps, len(downs) if span is None else span.whole)


def _weight(module: nn.Module, name: str) -> torch.Tensor:
    weight = getattr(module, name, None)
    return weight.detach() if isinstance(weight, torch.Tensor) else torch.empty(0)


def _packed(module: nn.Module, name: str, kernels: Kernels | None) -> list[Linear]:
    weights = _weight(module, name)
    delattr(module, name)
    biases = _weight(module, f"{name}_bias") if module.has_bias else [None] * len(weights)
    linears = []
    for weight, bias in zip(weights, biases, strict=True):
        linear = Linear.of(weight.T.contiguous() if module.is_transposed else weight, bias)
        linear.finish(kernels)
        linears.append(linear)
    del weights, weight
    give_back_freed()
    return linears


def _gate(module: nn.Module) -> Activation | Gate:
    """An activation if that is all there is between the products, and the kernels know it; else the module's code,
    which asks for none of its weights."""
    gate = module._apply_gate
    is_default = getattr(gate, "__module__", None) == _INTERFACE
    activation = _activation(getattr(module, "act_fn", None))
    if is_default and module.is_concatenated and not module.has_bias and activation is not None:
        return activation
    return gate  # type: ignore[return-value]


def _activation(function: object) -> Activation | None:
    from transformers.activations import GELUTanh, SiLUActivation

    if isinstance(function, nn.SiLU | SiLUActivation):
        return Activation.SILU
    return Activation.GELU_TANH if isinstance(function, GELUTanh) else None
