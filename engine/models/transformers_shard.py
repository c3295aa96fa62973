"""A rank's part of a model that runs on transformers' code.

The model is built from a config with this rank's numbers of heads and inner elements, so transformers' code computes a
smaller model. transformers' own plan for tensor parallelism says which weights are cut, and how: results of `colwise`
layers, inputs of `rowwise` layers, whose results the ranks add up. Whatever the plan leaves whole is on every rank:
embedding, head, norms, routers. Experts are cut like that, too, or each rank has some of them whole (expert
parallelism). Of data ranks each has all but some experts. Of the files no more is read than this rank has.

Code may use the number of a head in a way that shapes do not show. So only model types are served that were compared
with one rank (`SHARED`).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import nn

from common.errors import StartupError
from common.model_files import ModelFiles
from engine.loading.checkpoints.checkpoint import readable
from engine.loading.checkpoints.part import Part
from engine.models.own_experts import is_experts
from engine.models.shard import Span, dealing_flag, dealt_experts, dealt_out
from engine.ranks.data_ranks import DataRanks
from engine.ranks.dealt_experts import DealtExperts
from engine.ranks.group import RankGroup

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

SHARED = frozenset(
    [
        "afmoe",
        "apertus",
        "arcee",
        "axk1",
        "beam",
        "cohere",
        "cohere2",
        "cohere2_moe",
        "cohere_compass_text",
        "cwm",
        "deepseek_v2",
        "deepseek_v3",
        "dots1",
        "ernie4_5",
        "ernie4_5_moe",
        "exaone4",
        "exaone_moe",
        "flex_olmo",
        "flint",
        "gemma",
        "glm",
        "glm4",
        "glm4_moe",
        "glm4_moe_lite",
        "granite",
        "granite_swa",
        "hy_v3",
        "hyperclovax",
        "jais2",
        "kolibri1",
        "mellum",
        "minicpm3",
        "minimax_m2",
        "ministral",
        "ministral3",
        "nanochat",
        "nemotron",
        "olmo",
        "olmo2",
        "olmo3",
        "olmoe",
        "phi",
        "phimoe",
        "qwen2_moe",
        "seed_oss",
        "smollm3",
        "solar_open",
        "starcoder2",
        "vaultgemma",
        "youtu",
    ]
)
"""Model types whose ranks gave what one rank gives."""

_INNER = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
# Latent attention, which plans leave whole: the matrices that have rows, or columns, for heads.
_LATENT_PLAN = {"q_proj": "colwise", "q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
# What some plans leave out of their MLPs.
_MLP_PLAN = {
    f"layers.*.mlp.{block}{name}": style
    for block in ("", "shared_experts.", "shared_expert.")
    for name, style in (("gate_proj", "colwise"), ("up_proj", "colwise"), ("down_proj", "rowwise"))
}
_CUT = ("colwise", "packed_colwise", "rowwise")
_EXPERTS = "moe_tp_experts"  # the style of a module with all experts of a layer


@dataclass(slots=True, frozen=True)
class TransformersShard:
    """How a model is cut for one rank."""

    group: RankGroup
    config: PreTrainedConfig  # of this part
    plan: Mapping[str, str]  # styles by module or parameter, with * for numbers
    kv_shard: tuple[int, int]  # which part of the KV heads is here, of how many
    deals_experts: bool  # each rank has some whole, in place of a part of each
    num_cuts: int  # into how many parts `config` cuts inner sizes

    def dealt_experts(self, num_experts: int) -> DealtExperts:
        return dealt_experts(num_experts, self.group)

    def style_of(self, name: str) -> str:
        """Of a parameter; empty if it is on every rank."""
        generic = _generic(name)
        style = self.plan.get(generic) or self.plan.get(generic.rpartition(".")[0], "")
        return style if style in _CUT else ""

    def summed(self, base: nn.Module) -> Iterator[nn.Module]:
        """The modules whose results the ranks add up. Experts that are dealt out see to that themselves."""
        styles = ("rowwise",) if self.deals_experts else ("rowwise", _EXPERTS)
        for name, module in base.named_modules():
            if self.plan.get(_generic(name)) in styles:
                yield module

    def keep_dealt(self, base: nn.Module) -> dict[str, Span]:
        """Gives modules of experts, which have a part of every expert, the sizes of this rank's, whole, on the meta
        device. Returns which experts these are, by the names of their parameters; none if experts are not dealt out.
        Raises `StartupError` if they cannot be."""
        spans: dict[str, Span] = {}
        for name, module in base.named_modules() if self.deals_experts else ():
            if self.plan.get(_generic(name)) != _EXPERTS:
                continue
            if not is_experts(module) or module.has_bias:
                raise StartupError(
                    f"{dealing_flag(self.group)}: the experts of model type {self.config.model_type} cannot be "
                    "dealt out; leave it at 1"
                )
            for key, inner in (("gate_up_proj", 1), ("down_proj", 2)):
                weight = getattr(module, key)
                sizes = list(weight.shape)
                span = spans[f"{name}.{key}"] = dealt_out(sizes[0], self.group)
                sizes[0] = span.size
                sizes[3 - inner if module.is_transposed else inner] *= self.num_cuts
                setattr(module, key, nn.Parameter(weight.new_empty(sizes, device="meta"), requires_grad=False))
        return spans

    def part_of(self, name: str, shape: tuple[int, ...], target: tuple[int, ...]) -> Part | None:
        """Of a tensor of the files that becomes (a part of) the parameter `name`, whose shape here is `target`; None if
        it is whole. Raises `StartupError` if it cannot be cut."""
        style = self.style_of(name)
        if not style or (style == "rowwise" and len(shape) == 1):
            return None
        if len(shape) > 2:
            raise StartupError(f"tensor {name} has the weights of all experts, which cannot be cut yet")
        if style == "rowwise":
            return Part(1, (_share(shape[1], self.group.rank, self.group.size, name),))
        if style == "packed_colwise" and len(target) == 2:
            start, stop = _share(shape[0] // 2, self.group.rank, self.group.size, name)
            return Part(0, ((start, stop), (shape[0] // 2 + start, shape[0] // 2 + stop)))
        if len(target) == len(shape) and target[0] * self.group.size != shape[0]:  # KV heads that ranks share
            return Part(0, (_share(shape[0], *self.kv_shard, name),))
        return Part(0, (_share(shape[0], self.group.rank, self.group.size, name),))


def _generic(name: str) -> str:
    """As plans have names: `*` for the number of a layer or expert."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def _share(count: int, rank: int, size: int, name: str) -> tuple[int, int]:
    if count % size:
        raise StartupError(f"--tensor-parallel-size {size} does not divide {count} rows or columns of {name}")
    return rank * count // size, (rank + 1) * count // size


def shard_of_transformers(
    config: PreTrainedConfig, group: RankGroup, *, deals_experts: bool = False
) -> TransformersShard:
    """`deals_experts`: each rank has some experts whole, in place of a part of each; data ranks have them so in any
    case. Raises `StartupError` that names what the ranks cannot share. Reads no weights."""
    is_data = isinstance(group, DataRanks)
    flag = f"--{'data' if is_data else 'tensor'}-parallel-size {group.size}"
    model_type = str(config.model_type)
    plan = dict(getattr(config, "base_model_tp_plan", None) or {})
    if model_type not in SHARED or not plan:
        raise StartupError(
            f"{flag}: model type {model_type} runs on transformers' code and was not compared on several ranks; "
            "Baton's own decoders can be shared, and what docs/models.md lists"
        )
    if is_data:
        plan = {name: style for name, style in plan.items() if style == _EXPERTS}
        if not plan:
            raise StartupError(f"{flag}: this model has no experts; start more workers instead")
        return TransformersShard(group, copy.deepcopy(config), plan, (0, 1), deals_experts=True, num_cuts=1)
    if deals_experts and _EXPERTS not in plan.values():
        raise StartupError(f"--expert-parallel-size {group.size}: this model has no experts")
    plan = _MLP_PLAN | plan
    merged, down = "layers.*.mlp.gate_up_proj", "layers.*.mlp.down_proj"
    if (plan.get(merged), plan[down]) == ("colwise_gather_output", "rowwise_split_input"):
        plan |= {merged: "packed_colwise", down: "rowwise"}  # gates first, then ups: both are cut
    own = copy.deepcopy(config)
    heads = int(config.num_attention_heads)
    num_kv = int(getattr(config, "num_key_value_heads", None) or heads)
    is_latent = getattr(config, "kv_lora_rank", None) is not None
    if is_latent:
        plan |= {f"layers.*.self_attn.{name}": style for name, style in _LATENT_PLAN.items()}
    kv_shard = (0, 1)
    if any(style == "rowwise" and name.startswith("layers.*.self_attn.") for name, style in plan.items()):
        if heads % group.size:
            raise StartupError(f"{flag} does not divide {heads} attention heads")
        if num_kv % group.size and group.size % num_kv:
            raise StartupError(f"{flag} is neither a divisor nor a multiple of {num_kv} KV heads")
        if getattr(config, "head_dim", None) is None:
            own.head_dim = config.hidden_size // heads
        own.num_attention_heads = heads // group.size
        num_here = max(num_kv // group.size, 1)
        if getattr(config, "num_key_value_heads", None) is not None:
            own.num_key_value_heads = num_here
        if not is_latent:
            kv_shard = (group.rank * num_kv // group.size // num_here, num_kv // num_here)
    for key in _INNER:
        size = getattr(config, key, None)
        if isinstance(size, int) and not isinstance(size, bool):
            if size % group.size:
                raise StartupError(f"{flag} does not divide {size}, the {key} of config.json")
            setattr(own, key, size // group.size)
    return TransformersShard(group, own, plan, kv_shard, deals_experts, num_cuts=group.size)


class _Slice:
    """A part of a tensor in a file, read when transformers asks for it."""

    def __init__(self, handle: Any, name: str, part: Part | None) -> None:
        self._handle, self._name, self._part = handle, name, part

    def __getitem__(self, index: object) -> torch.Tensor:
        whole = self._handle.get_slice(self._name)
        if self._part is None:
            everything: torch.Tensor = whole[...]
            return everything
        if self._part.axis == 1:
            ((start, stop),) = self._part.ranges
            columns: torch.Tensor = whole[:, start:stop]
            return columns
        return torch.cat([whole[start:stop] for start, stop in self._part.ranges])


def _number_of_expert(name: str) -> int:
    """Of a tensor in a file that has one expert's weights."""
    found = re.search(r"\.experts\.(\d+)\.", name)
    if found is None:
        raise StartupError(f"--expert-parallel-size: tensor {name} does not tell which expert it belongs to")
    return int(found[1])


def _with_dealt_experts(model_class: type[PreTrainedModel], shard: TransformersShard) -> type[PreTrainedModel]:
    """The class, but its models have the experts that are dealt out to this rank."""
    if not shard.deals_experts:
        return model_class

    def init(self: PreTrainedModel, *args: object, **kwargs: object) -> None:
        model_class.__init__(self, *args, **kwargs)
        shard.keep_dealt(getattr(self, model_class.base_model_prefix))

    names = {"__init__": init, "__module__": model_class.__module__}  # transformers looks both names up
    return type(model_class.__name__, (model_class,), names)


def load_shard(
    files: ModelFiles, shard: TransformersShard, dtype: torch.dtype, attention: str
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """The model and what transformers says about its loading, as its `from_pretrained` gives them. Raises whatever
    that raises, and `StartupError` for a tensor that cannot be cut."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[type(shard.config)]
    with torch.device("meta"):
        shapes_of = model_class(shard.config)
    dealt = shard.keep_dealt(getattr(shapes_of, model_class.base_model_prefix))
    targets = shapes_of.state_dict()
    conversions = get_model_conversion_mapping(shapes_of)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    prefix = f"{model_class.base_model_prefix}."
    with ExitStack() as stack:
        slices: dict[str, _Slice] = {}
        for path in files.weight_files:
            with readable(path):
                handle = stack.enter_context(safe_open(path, framework="pt"))
                for name in handle.keys():  # noqa: SIM118 - it is no mapping
                    target, _ = rename_source_key(name, renamings, converters, model_class.base_model_prefix, targets)
                    part = None
                    if target in targets:
                        shape = tuple(handle.get_slice(name).get_shape())
                        own = target.removeprefix(prefix)
                        if own not in dealt:
                            part = shard.part_of(own, shape, tuple(targets[target].shape))
                        elif len(shape) == 3:  # all experts
                            part = Part(0, ((dealt[own].start, dealt[own].stop),))
                        elif not dealt[own].start <= _number_of_expert(name) < dealt[own].stop:
                            continue
                    slices[name] = _Slice(handle, name, part)
        top, found = _with_dealt_experts(model_class, shard).from_pretrained(
            None,
            config=shard.config,
            state_dict=slices,
            dtype=dtype,
            attn_implementation=attention,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    if shard.group.rank:
        for module in shard.summed(getattr(top, model_class.base_model_prefix)):
            bias = getattr(module, "bias", None)
            if isinstance(bias, torch.Tensor):
                bias.data.zero_()  # rank 0 adds it
    return top, found


def add_up(base: nn.Module, shard: TransformersShard) -> None:
    """Has the modules whose results are summands of all ranks give the sum. Called once, when the modules are those
    that compute."""

    def reduced(_module: nn.Module, _inputs: object, output: torch.Tensor) -> torch.Tensor:
        output = output.contiguous()
        shard.group.all_reduce(output)
        return output

    for module in shard.summed(base):
        module.register_forward_hook(reduced)
