"""Any pure-attention decoder of transformers, on Baton's cache: its own code computes all but attention.

transformers asks a registered function for attention (`AttentionInterface`); this one writes K and V into the paged
cache and attends there, through the same backends as Baton's own decoder. What a model's attention looks like (heads,
scale, windows) is found by asking it to compute two tokens. A model that asks for what the backends lack is refused.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from common.errors import StartupError
from common.model_files import ModelFiles
from engine.attention.base import StepAttention
from engine.kernels.library import Kernels
from engine.layers import Linear
from engine.models.base import CausalLM
from engine.models.latent import keep_latents, latent_of
from engine.models.verified import COMPARED_WITH

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

log = logging.getLogger(__name__)

INTERFACE = "baton"
# Keyword arguments that say nothing about the result when there is one flat batch and no training.
_HARMLESS = frozenset(
    {"dropout", "scaling", "sliding_window", "softcap", "position_ids", "use_cache", "cache_position", "is_causal"}
    | {"output_attentions", "output_hidden_states", "return_dict", "layer_head_mask", "position_embeddings"}
    | {"num_items_in_batch", "output_router_logits", "logits_to_keep", "past_key_values", "rotary_pos_emb"}
)
_CALLED = {"s_aux": "sinks (s_aux)"}


class UnsupportedAttentionError(Exception):
    """A model's attention is none that the backends compute; the message is the reason."""


@dataclass(slots=True, frozen=True)
class _LayerShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int
    soft_cap: float
    latent_value_dim: int


@dataclass(slots=True)
class _Probe:
    """Stands in for a step while a model is looked at; attention gives zeros."""

    layers: dict[int, _LayerShape] = field(default_factory=dict)


@dataclass(slots=True, frozen=True)
class _Step:
    attention: StepAttention
    between_layers: Callable[[], None]


_current: ContextVar[_Probe | _Step] = ContextVar("step")


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """`query` `[1, num_heads, num_tokens, head_dim]`, `key` and `value` likewise; returns `[1, num_tokens, ...]`."""
    current = _current.get()
    layer, latent = getattr(module, "layer_idx", None), latent_of(module)
    if isinstance(current, _Probe):
        _look(current, module, query, key, value, attention_mask, options)
        value_dim = query.shape[3] if latent is None else latent.value_dim
        return value.new_zeros(1, query.shape[2], query.shape[1], value_dim), None
    if not isinstance(layer, int):
        raise TypeError("an attention layer without a number")
    if latent is not None:
        out = current.attention.forward(layer, latent.queries(query[0]), key.permute(2, 0, 1, 3))
        current.between_layers()
        return latent.results(out)[None], None
    kv = torch.stack((key[0], value[0])).permute(2, 0, 1, 3)
    out = current.attention.forward(layer, query[0].transpose(0, 1), kv)
    current.between_layers()
    return out.view(1, query.shape[2], query.shape[1], query.shape[3]), None


def _look(
    probe: _Probe,
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    options: dict[str, object],
) -> None:
    layer = getattr(module, "layer_idx", None)
    if not isinstance(layer, int):
        raise UnsupportedAttentionError("attention layers without a number")
    if layer in probe.layers:
        raise UnsupportedAttentionError("layers that attend more than once")
    latent = latent_of(module)
    if latent is None and (key.shape != value.shape or query.shape[3] != key.shape[3]):
        raise UnsupportedAttentionError("K and V of unlike sizes")
    if query.shape[2] != key.shape[2] or query.shape[0] != 1:
        raise UnsupportedAttentionError("attention to other tokens than those of the sequence")
    if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
        raise UnsupportedAttentionError("attention to later tokens")
    if mask is not None:
        raise UnsupportedAttentionError("a mask of its own")
    for name, option in options.items():
        if name not in _HARMLESS and option is not None and option is not False:
            raise UnsupportedAttentionError(f"attention with {_CALLED.get(name, name)}")
    scale, window, cap = options.get("scaling"), options.get("sliding_window"), options.get("softcap")
    if isinstance(scale, torch.Tensor):
        raise UnsupportedAttentionError("a scale for each token")
    probe.layers[layer] = _LayerShape(
        num_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=key.shape[3],
        scale=float(scale) if isinstance(scale, int | float) else query.shape[3] ** -0.5,
        window=window if isinstance(window, int) else 0,
        soft_cap=float(cap) if isinstance(cap, int | float) else 0.0,
        latent_value_dim=0 if latent is None else latent.latent_dim,
    )


def check_layer_types(config: PreTrainedConfig) -> None:
    """Raises `UnsupportedAttentionError` if layers keep anything but the KV of tokens, or see others than a window."""
    kinds = {str(kind) for key in ("layer_types", "layers_block_type") for kind in getattr(config, key, None) or ()}
    if odd := sorted(kinds - {"full_attention", "sliding_attention", "attention", "dense", "sparse"}):
        raise UnsupportedAttentionError(f"layers of type {', '.join(odd)}")


class _Hidden:
    """Hidden states as a model's output; whatever else an output may have is None."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, index: int | slice) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return (self.last_hidden_state,)[index]


class _Given(nn.Module):
    """In the place of a model below its head: gives the hidden states that were computed before."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.empty(0)

    @property
    def decoder(self) -> _Given:
        """Some heads ask the decoder inside their model."""
        return self

    def forward(self, *_: object, **__: object) -> _Hidden:
        return _Hidden(self.hidden)


class _OwnLinear(nn.Module):
    """Baton's linear layer in the place of torch's, or of transformers' Conv1D, whose weight is the transpose."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, kernels: Kernels | None, *, is_head: bool
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self._linear = Linear.of(weight, bias)
        self._linear.finish(kernels, is_head=is_head)
        # For code that asks for its dtype; computing with it fails.
        self.weight = torch.empty_like(weight, device="meta")
        self.bias = None if bias is None else torch.empty_like(bias, device="meta")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._linear(x.reshape(-1, self.in_features)).view(*x.shape[:-1], self.out_features)


class TransformersModel(CausalLM):
    def __init__(self, config: PreTrainedConfig, *, dtype: torch.dtype, device: torch.device) -> None:
        """Knows its sizes when it was loaded. Raises `StartupError` if the architecture cannot be served."""
        import transformers

        self._config, self._dtype, self._device = config, dtype, device
        self.kv_variant = f"transformers {transformers.__version__}"  # its code decides what is in the blocks

    def load(self, files: ModelFiles, kernels: Kernels | None) -> None:  # noqa: ARG002
        from transformers import AttentionInterface, AutoModelForCausalLM

        try:
            check_layer_types(self._config)
        except UnsupportedAttentionError as error:
            raise self._refusal(error) from error
        AttentionInterface.register(INTERFACE, _attend)
        try:
            top, found = AutoModelForCausalLM.from_pretrained(
                Path(files.path),
                dtype=self._dtype,
                attn_implementation=INTERFACE,
                local_files_only=True,
                output_loading_info=True,
            )
        except Exception as error:  # of many kinds, by as many models
            raise StartupError(f"model {files.path}: transformers cannot load it: {_line(error)}") from error
        # transformers would go on with random numbers.
        for kind, problem in (("missing_keys", "lacks tensor"), ("unexpected_keys", "has tensor, which is not known,")):
            if found[kind]:
                raise StartupError(f"model {files.path} {problem} {min(found[kind])}; download it again")
        self._top: nn.Module = top.eval().to(self._device)
        try:
            self._take_apart()
        except UnsupportedAttentionError as error:
            raise self._refusal(error) from error
        layers = self._look_at_layers()
        first = layers[0]
        self.num_layers = len(layers)
        self.num_heads, self.num_kv_heads, self.head_dim = first.num_heads, first.num_kv_heads, first.head_dim
        self.softmax_scale, self.soft_cap = first.scale, first.soft_cap
        self.latent_value_dim = first.latent_value_dim
        self.windows = tuple(layer.window for layer in layers)

    def _look_at_layers(self) -> list[_LayerShape]:
        try:
            return self._probe()
        except UnsupportedAttentionError as error:
            raise self._refusal(error) from error
        except Exception as error:
            raise StartupError(
                f"model type {self._config.model_type} does not compute on a paged cache: {_line(error)}"
            ) from error

    def _refusal(self, error: UnsupportedAttentionError) -> StartupError:
        return StartupError(f"model type {self._config.model_type} has {error}, which is not supported")

    def _take_apart(self) -> None:
        name = str(self._top.base_model_prefix)
        base = getattr(self._top, name, None)
        if not isinstance(base, nn.Module):
            raise UnsupportedAttentionError("a head that cannot be told from its layers")
        keep_latents(base)
        self._base, self._given = base, _Given()
        setattr(self._top, name, self._given)

    def _probe(self) -> list[_LayerShape]:
        probe = _Probe()
        tokens = torch.zeros(2, dtype=torch.long, device=self._device)
        called: set[nn.Module] = set()
        hook = register_module_forward_pre_hook(lambda module, _: called.add(module))
        try:
            with self._as_current(probe):
                hidden = self._run(tokens, torch.arange(2, device=self._device))
            self.hidden_size = hidden.shape[1]
            self.vocab_size = self.logits(hidden).shape[1]
        finally:
            hook.remove()
        self._not_called = {child for parent in called for child in parent.children()} - called
        if sorted(probe.layers) != list(range(len(probe.layers))) or not probe.layers:
            raise UnsupportedAttentionError("layers without attention, or attention of its own")
        layers = [probe.layers[index] for index in range(len(probe.layers))]
        if len({replace(layer, window=0) for layer in layers}) > 1:
            raise UnsupportedAttentionError("layers whose attention has unlike shapes")
        types = getattr(self._config, "layer_types", None) or ()
        if any(kind == "sliding_attention" and not layer.window for kind, layer in zip(types, layers, strict=False)):
            raise UnsupportedAttentionError("windows that its attention does not tell")
        return layers

    def finish(self, kernels: Kernels | None) -> None:
        """Linear layers become Baton's, but for a head whose weight is an embedding's too: that one does if weights are
        quantised, and the embedding stays as it is. So does a layer whose weight is used, but that is never called."""
        import transformers
        from transformers.pytorch_utils import Conv1D

        quantises = kernels is not None and kernels.quantization != "none"
        shared = {id(module.weight) for module in self._base.modules() if isinstance(module, nn.Embedding)}
        num_swapped = 0  # elements
        for parent in [*self._base.modules(), self._top]:
            for name, child in list(parent.named_children()):
                if type(child) not in (nn.Linear, Conv1D) or child in self._not_called:
                    continue
                weight: nn.Parameter = child.weight  # type: ignore[assignment]
                bias: nn.Parameter | None = child.bias  # type: ignore[assignment]
                is_head = parent is self._top
                if not is_head or quantises or id(weight) not in shared:
                    own = weight.T.contiguous() if type(child) is Conv1D else weight
                    setattr(parent, name, _OwnLinear(own, bias, kernels, is_head=is_head))
                    num_swapped += weight.numel()
        if quantises:
            self._say_what_is_not_quantised(num_swapped)
        self._look_at_layers()  # with what was put in
        log.info(
            "the model's layers are those of transformers",
            extra={
                "model_type": self._config.model_type,
                "transformers": transformers.__version__,
                "compared_with": COMPARED_WITH,
            },
        )

    def _say_what_is_not_quantised(self, num_quantised: int) -> None:
        """Logs which matrices keep their precision, such as experts in one tensor, by the class of their module."""
        left: Counter[str] = Counter()
        for module in {*self._base.modules(), *self._top.modules()}:
            count = sum(each.numel() for each in module.parameters(recurse=False) if each.dim() > 1)
            if count:
                left[type(module).__name__] += count
        total = num_quantised + sum(left.values())
        log.info(
            "weights are quantised, but for those of some modules",
            extra={
                "quantised_percent": round(100 * num_quantised / total),
                "in_full_precision": ", ".join(f"{name}: {count}" for name, count in sorted(left.items())) or "none",
            },
        )

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        between_layers: Callable[[], None],
    ) -> torch.Tensor:
        with self._as_current(_Step(attention, between_layers)):
            return self._run(token_ids, positions)

    def last_states(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._given.hidden = hidden[None]
        tokens = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=self._device)
        logits: torch.Tensor = self._top(input_ids=tokens, use_cache=False).logits[0]
        return logits

    def _run(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        out = self._base(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    @contextmanager
    def _as_current(self, current: _Probe | _Step) -> Iterator[None]:
        token = _current.set(current)
        try:
            yield
        finally:
            _current.reset(token)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
