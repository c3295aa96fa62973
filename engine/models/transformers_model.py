"""Any pure-attention decoder of transformers, on Baton's cache: its own code computes all but attention.

transformers asks a registered function for attention (`AttentionInterface`); this one writes K and V into the paged
cache and attends there, through the same backends as Baton's own decoder. What a model's attention looks like (heads,
scale, windows) is found by asking it to compute two tokens. A model that asks for what the backends lack is refused.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from common.errors import StartupError
from common.model_files import ModelFiles
from common.process.allocator import freeing_at_once, give_back_freed
from engine.attention.base import StepAttention
from engine.kernels.library import Kernels
from engine.loading.progress import Progress
from engine.loading.weights import check_files
from engine.models.adapted_attention import ADAPTED, adapt_attention
from engine.models.attention_interface import (
    INTERFACE,
    LayerShape,
    Probe,
    Step,
    UnsupportedAttentionError,
    attend,
    check_layer_types,
    current_step,
)
from engine.models.base import CausalLM
from engine.models.fixed_rope import fix_frequencies, longrope_variant
from engine.models.latent import keep_latents
from engine.models.leftovers import is_leftover
from engine.models.own_experts import OwnExperts, experts_of, is_experts, own_experts
from engine.models.own_layers import Calls, own_linears, swap_heads
from engine.models.positions import GivenPositions, first_position
from engine.models.shard import dealt_out, log_dealt_out
from engine.models.transformers_shard import TransformersShard, add_up, load_shard, shard_of_transformers
from engine.models.verified import COMPARED_WITH
from engine.ranks.group import RankGroup

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

log = logging.getLogger(__name__)

_LOADING = threading.Lock()
"""While transformers loads a model it replaces functions of torch: two threads would put back each other's."""

GIVE_BACK_BYTES = 8 * 2**20  # of weights that were packed, before their memory is given back

# Their masks have the window of config.json, which attention is not told.
_WINDOW_IN_MASK = frozenset({"phimoe"})


def is_mxfp4(config: Mapping[str, object]) -> bool:
    """If a checkpoint's experts are 4-bit floats with a scale for 32 of them, as those of gpt-oss."""
    quantized = config.get("quantization_config")
    return isinstance(quantized, Mapping) and quantized.get("quant_method") == "mxfp4"


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
    """Stands in the place of a model below its head, and gives the hidden states that were computed before."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = torch.empty(0)

    @property
    def decoder(self) -> _Given:
        """Some heads ask the decoder inside their model."""
        return self

    def forward(self, *_: object, **__: object) -> _Hidden:
        return _Hidden(self.hidden)


class TransformersModel(CausalLM):
    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        num_positions: int,
        dtype: torch.dtype,
        device: torch.device,
        group: RankGroup | None = None,
        deals_experts: bool = False,
    ) -> None:
        """For sequences up to `num_positions`. Knows its sizes when it was loaded. `group`: the ranks that share it;
        `deals_experts`: each has some experts whole. Raises `StartupError` if the architecture cannot be served, or
        the ranks cannot share it."""
        import transformers

        self._shard = None
        self._experts_in_order: list[OwnExperts] = []  # as a forward pass calls them, if they are dealt out
        if group is not None and group.size > 1:
            self._shard = shard_of_transformers(config, group, deals_experts=deals_experts)
        if self._shard is not None:
            config, self.kv_shard = self._shard.config, self._shard.kv_shard
        self._config, self._dtype, self._device = config, dtype, device
        # Its code decides what is in the blocks, and so do positions, which the model's identity does not tell of.
        self.kv_variant = f"transformers {transformers.__version__}"
        if position := first_position(config):
            self.kv_variant += f" from position {position}"
        self._num_positions, self._longrope = num_positions, longrope_variant(config, num_positions)
        if self._longrope:
            self.kv_variant += f" {self._longrope}"
            log.info("rotary frequencies", extra={"rope": self._longrope, "max_model_len": num_positions})

    def load(self, files: ModelFiles, kernels: Kernels | None) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM, Mxfp4Config

        check_files(files)  # transformers would not name the file that is not whole
        try:
            check_layer_types(self._config)
        except UnsupportedAttentionError as error:
            raise self._refusal(error) from error
        AttentionInterface.register(INTERFACE, attend)
        widening = {}
        if is_mxfp4(files.config):
            times = 2 * self._dtype.itemsize
            log.warning("the mxfp4 weights are widened at load", extra={"memory_of_the_file": f"{times} times"})
            widening["quantization_config"] = Mxfp4Config(dequantize=True)
        try:
            with _LOADING, freeing_at_once():
                if self._shard is not None:
                    top, found = load_shard(files, self._shard, self._dtype, INTERFACE)
                else:
                    top, found = AutoModelForCausalLM.from_pretrained(
                        Path(files.path),
                        config=self._config,
                        dtype=self._dtype,
                        attn_implementation="eager" if self._config.model_type in ADAPTED else INTERFACE,
                        local_files_only=True,
                        output_loading_info=True,
                        ignore_mismatched_sizes=True,  # they are told apart below, by name
                        **widening,
                    )
        except StartupError:
            raise
        except Exception as error:  # of many kinds, by as many models
            raise StartupError(f"model {files.path}: transformers cannot load it: {_line(error)}") from error
        # transformers would go on with random numbers.
        for name, shape, wanted in sorted(found["mismatched_keys"]):
            raise StartupError(
                f"model {files.path}: tensor {name} has shape {list(shape)}, config.json asks for {list(wanted)}"
            )
        unknown = [name for name in found["unexpected_keys"] if not is_leftover(name)]
        for problem, names in (("lacks tensor", found["missing_keys"]), ("has tensor, which is not known,", unknown)):
            if names:
                raise StartupError(f"model {files.path} {problem} {min(names)}; download it again")
        self._top: nn.Module = top.eval().to(self._device)
        try:
            self._take_apart()
        except UnsupportedAttentionError as error:
            raise self._refusal(error) from error
        self._take_dealt_experts(kernels)
        layers, self.sinks = self._look_at_layers()
        first = layers[0]
        self.num_layers = len(layers)
        self.num_heads = first.num_heads
        shape = _cache_shape(layers)
        self.num_kv_heads, self.head_dim = shape["num_kv_heads"], shape["head_dim"]
        self.softmax_scale, self.soft_cap = first.scale, first.soft_cap
        self.latent_value_dim = first.latent_value_dim
        self.windows = tuple(layer.window for layer in layers)

    def _look_at_layers(self) -> tuple[list[LayerShape], torch.Tensor | None]:
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
        adapt_attention(self._config, base)
        keep_latents(base)
        if self._longrope:
            fix_frequencies(base, self._num_positions)
        self._base, self._given = base, _Given()
        self._positions, self._first_position = GivenPositions(base), first_position(self._config)
        setattr(self._top, name, self._given)

    def _take_dealt_experts(self, kernels: Kernels | None) -> None:
        """transformers' code does not compute some of the experts, so ours do before it first runs."""
        self._num_swapped = 0  # elements
        if self._shard is None or not self._shard.deals_experts:
            return
        span = None
        for parent, (name,) in experts_of(self._base):
            module = getattr(parent, name)
            span = dealt_out(module.num_experts, self._shard.group)
            self._num_swapped += module.gate_up_proj.numel() + module.down_proj.numel()
            setattr(parent, name, own_experts(module, kernels, span))
        if span is not None:
            log_dealt_out(span)

    def _probe(self) -> tuple[list[LayerShape], torch.Tensor | None]:
        """Attention of all layers, and their sinks `[num_layers, num_heads]` float32 if any has some."""
        probe = Probe()
        tokens = torch.zeros(2, dtype=torch.long, device=self._device)
        calls = Calls()
        hook = register_module_forward_pre_hook(calls.note)
        try:
            with self._as_current(probe):
                hidden = self._run(tokens, torch.arange(2, device=self._device))
            self.hidden_size, self.states_dtype = hidden.shape[1], hidden.dtype
            self.vocab_size = self.logits(hidden).shape[1]
        finally:
            hook.remove()
        self._linears = [(parent, names) for parent in self._base.modules() for names in calls.linears_of(parent)]
        self._heads = [
            (parent, name) for parent in self._top.modules() for names in calls.linears_of(parent) for name in names
        ]
        if set(probe.numbers) != set(range(len(set(probe.numbers)))) or not probe.numbers:
            raise UnsupportedAttentionError("layers without attention, or attention of its own")
        layers = probe.calls
        widest = _cache_shape(layers)
        if len({replace(layer, window=0, **widest) for layer in layers}) > 1:
            raise UnsupportedAttentionError("layers whose attention has unlike shapes")
        if self._config.model_type in _WINDOW_IN_MASK:
            layers = [replace(layer, window=self._config.sliding_window or 0) for layer in layers]
        types = dict(enumerate(getattr(self._config, "layer_types", None) or ()))
        for number, layer in zip(probe.numbers, layers, strict=True):
            if types.get(number) == "sliding_attention" and not layer.window:
                raise UnsupportedAttentionError("windows that its attention does not tell")
        if not probe.sinks:
            return layers, None
        sinks = torch.full((len(layers), layers[0].num_heads), float("-inf"))
        for index, scores in probe.sinks.items():
            sinks[index] = scores
        return layers, sinks

    def finish(self, kernels: Kernels | None) -> None:
        """Linear layers become Baton's, with kernels one for all that are given the same tensor, and experts do."""
        import transformers

        quantises = kernels is not None and kernels.quantization != "none"
        # Torch is slower with parts of a product that lie apart than with products of their own.
        groups = (
            [*experts_of(self._base), *self._linears]
            if kernels is not None
            else [(top, [name]) for top, names in self._linears for name in names]
        )
        what = f"quantising weights to {kernels.quantization}" if kernels and quantises else "replacing linear layers"
        num_swapped = self._num_swapped
        num_freed_bytes = 0  # since memory was given back
        with Progress(what, len(groups), "") as progress:
            for parent, names in groups:
                weights = _swap(parent, names, kernels)
                num_swapped += sum(weight.numel() for weight in weights)
                num_freed_bytes += sum(weight.nbytes for weight in weights)
                if num_freed_bytes >= GIVE_BACK_BYTES:
                    give_back_freed()
                    num_freed_bytes = 0
                progress.add()
        num_swapped += swap_heads(self._heads, self._base, kernels)
        if self._shard is not None:
            add_up(self._base, self._shard)
            self._join_experts(self._shard)
        give_back_freed()
        if quantises:
            self._say_what_is_not_quantised(num_swapped)
        with self._noting_experts():
            self._look_at_layers()  # with what was put in
        log.info(
            "the model's layers are those of transformers",
            extra={
                "model_type": self._config.model_type,
                "transformers": transformers.__version__,
                "compared_with": COMPARED_WITH,
            },
        )

    def _join_experts(self, shard: TransformersShard) -> None:
        """From now on experts that are dealt out give what those of all ranks give."""
        for module in self._base.modules() if shard.deals_experts else ():
            if isinstance(module, OwnExperts):
                module.dealt = shard.dealt_experts(module.num_experts)

    @contextmanager
    def _noting_experts(self) -> Iterator[None]:
        """Notes in which order a forward pass calls experts that are dealt out."""

        def note(module: nn.Module, _inputs: object) -> None:
            if isinstance(module, OwnExperts):
                self._experts_in_order.append(module)

        dealt = [module for module in self._base.modules() if isinstance(module, OwnExperts) and module.dealt]
        hooks = [module.register_forward_pre_hook(note) for module in dealt]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

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
        if not len(token_ids):  # a data rank without a row: others need its experts
            for experts in self._experts_in_order:
                experts.compute_for_others()
            return torch.empty((0, self.hidden_size), dtype=self.states_dtype)
        step = Step(attention, between_layers, self.num_kv_heads, self.head_dim)
        with self._as_current(step):
            hidden = self._run(token_ids, positions)
        if step.num_calls != self.num_layers:
            raise RuntimeError(f"{step.num_calls} calls of attention, not {self.num_layers} as when it was loaded")
        return hidden

    def last_states(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        embedding = self._base.get_input_embeddings()  # type: ignore[operator]
        return F.embedding(token_ids, embedding.weight)

    def best_after_norm(self, states: torch.Tensor) -> torch.Tensor:
        return self.best_tokens(states)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._given.hidden = hidden[None]
        tokens = torch.zeros(1, hidden.shape[0], dtype=torch.long, device=self._device)
        logits: torch.Tensor = self._top(input_ids=tokens, use_cache=False).logits[0]
        return logits

    def _run(self, token_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        positions = positions + self._first_position
        self._positions.current = positions
        out = self._base(input_ids=token_ids[None], position_ids=positions[None], use_cache=False)
        hidden: torch.Tensor = out.last_hidden_state[0]
        return hidden

    @contextmanager
    def _as_current(self, current: Probe | Step) -> Iterator[None]:
        token = current_step.set(current)
        try:
            yield
        finally:
            current_step.reset(token)


def _swap(parent: nn.Module, names: Sequence[str], kernels: Kernels | None) -> list[torch.Tensor]:
    """Swaps linear layers that are given the same tensor, or a module of experts. Returns the weights that went, on the
    meta device."""
    modules = [getattr(parent, name) for name in names]
    if kernels is not None and is_experts(modules[0]):
        both = (modules[0].gate_up_proj, modules[0].down_proj)
        weights = [torch.empty_like(weight, device="meta") for weight in both]
        del both
        setattr(parent, names[0], own_experts(modules[0], kernels))
        return weights
    weights = [torch.empty_like(module.weight, device="meta") for module in modules]
    for name, own in zip(names, own_linears(modules, kernels), strict=True):
        setattr(parent, name, own)
    return weights


def _cache_shape(layers: Sequence[LayerShape]) -> dict[str, int]:
    """The shape of the cache, one for all layers. Raises `UnsupportedAttentionError` if there is none."""
    num_kv_heads = max(layer.num_kv_heads for layer in layers)
    if any(num_kv_heads % layer.num_kv_heads for layer in layers):
        raise UnsupportedAttentionError("layers whose attention has unlike shapes")
    latent = any(layer.latent_value_dim for layer in layers)
    head_dim = max(layer.head_dim if latent else max(layer.head_dim, layer.value_dim) for layer in layers)
    return {"num_kv_heads": num_kv_heads, "head_dim": head_dim, "value_dim": head_dim}


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
