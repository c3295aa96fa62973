"""Which decoders of transformers Baton computes alike: builds each one small and random, and compares.

`python -m tests.models.survey` writes engine/models/verified.py and the table in docs/models.md.
"""

from __future__ import annotations

import inspect
import json
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from common.errors import StartupError
from engine.models import registry
from engine.models.adapted_attention import ADAPTED
from engine.models.attention_interface import UnsupportedAttentionError, check_layer_types
from engine.models.families import FAMILIES
from engine.models.text_part import COMPOSITES
from tests.engine.tiny_models import Progress, advance, make_runner

ROOT = Path(__file__).parents[2]
VOCAB_SIZE = 96
NUM_TOKENS = 60
TOLERANCE = 2e-3  # of float32 logprobs, which spread over tens
MAX_PARAMETERS = 30_000_000
TIMEOUT_S = 90

# By all the names that configs have for them. Windows are shorter than what is computed.
SIZES: dict[str, object] = {
    **dict.fromkeys(("vocab_size", "text_vocab_size"), VOCAB_SIZE),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "shared_expert_intermediate_size"), 80
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len"), 256),
    **dict.fromkeys(
        ("moe_intermediate_size", "expert_intermediate_size", "expert_ffn_hidden_size", "intermediate_size_mlp"), 48
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k", "num_experts_per_token", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("pad_token_id",), 0),
    **dict.fromkeys(("bos_token_id",), 1),
    **dict.fromkeys(("eos_token_id",), 2),
    **dict.fromkeys(("decoder_layers", "encoder_layers"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 80),
    "max_target_positions": 256,
    "is_decoder": True,  # of what is an encoder otherwise
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "word_embed_proj_dim": 64,
    "rotary_dim": 16,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_rope_head_dim": 16,  # as head_dim: some configs take the one for the other
    "qk_nope_head_dim": 12,
    "v_head_dim": 20,
    "sliding_window": 20,
    "first_k_dense_replace": 1,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "num_kv_shared_layers": 2,
    "zero_expert_num": 2,
    "default_language": "en_XX",
}


# What is tried in turn if a type does not take these sizes.
VARIATIONS: tuple[dict[str, object], ...] = (
    {},
    {"num_key_value_heads": 4},
    {"num_key_value_heads": None, "head_dim": None, "pad_token_id": None},
    # Whose lists of layers are as long as they are by default, and what else single types ask for.
    {"num_hidden_layers": None, "num_experts_per_tok": 1, "num_heads": 8},
    {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in ("full_attention", "sliding_attention")
        },
    },
)


# Of types that are served in some variants only, or have names of their own.
SIZES_OF_TYPE: dict[str, dict[str, object]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 20},
    "granitemoehybrid": {"layer_types": ["full_attention"] * 4, "position_embedding_type": "rope"},
}

# Of types whose small config does not show it.
REASONS: dict[str, str] = {
    "gemma4_assistant": "it attends to the KV of another model",
    "gemma4_unified_assistant": "it attends to the KV of another model",
    "lfm2": "layers of type conv in the published checkpoints",
    "lfm2_moe": "layers of type conv in the published checkpoints",
    "minimax_m3_vl_text": "layers of type minimax_m3_sparse in the published checkpoints",
}


class UnbuildableError(Exception):
    """No small model of a type can be had; the message says why."""


def candidates() -> dict[str, str]:
    """Architectures by model type, but for those that Baton's own decoder computes."""
    return {
        model_type: name
        for model_type, name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
        if isinstance(name, str)
        and name not in FAMILIES
        and name not in COMPOSITES
        and model_type in CONFIG_MAPPING
        # Else checkpoints name another type.
        and CONFIG_MAPPING[model_type].model_type == model_type
    }


class RefusedError(Exception):
    """Why a model cannot be served."""


class DifferentError(RefusedError):
    """It computes, and something else."""


def examine(model_type: str, folder: Path) -> str:
    """Why this type is refused; empty if whole prompts, chunks and single tokens give what transformers gives."""
    reason = _examine(model_type, folder)
    if not reason or reason.startswith("it is made of") or not _is_pair(model_type):
        return reason
    return f"its checkpoints are of an encoder and a decoder; {reason}"


def _examine(model_type: str, folder: Path) -> str:
    if reason := REASONS.get(model_type, ""):
        return reason
    for number, variation in enumerate(VARIATIONS):
        try:
            with _time_limit():
                _compare(model_type, folder / str(number), variation)
        except UnbuildableError as error:
            reason = reason or _why_none_is_small(model_type) or f"not compared: {error}"
            continue
        except DifferentError as error:
            return _why_different(model_type, folder / "whole", variation) or str(error)
        except RefusedError as error:
            return str(error)
        except Exception as error:
            return f"it does not compute on a paged cache: {_line(error)}"
        return ""
    return reason


def _why_different(model_type: str, folder: Path, variation: Mapping[str, object]) -> str:
    try:
        _compare(model_type, folder, {**variation, "sliding_window": None})
    except (UnbuildableError, RefusedError):
        return ""
    return "windows that its attention does not tell"


def _is_pair(model_type: str) -> bool:
    try:
        return bool(CONFIG_MAPPING[model_type]().is_encoder_decoder)
    except Exception:  # some have no default
        return False


def _why_none_is_small(model_type: str) -> str:
    if parts := ", ".join(sorted(CONFIG_MAPPING[model_type].sub_configs_defaults)):
        return f"it is made of several models: {parts}"
    return "" if _has_interface(model_type) else "its code has no attention interface"


def _has_interface(model_type: str) -> bool:
    """If its code asks transformers' attention interface for attention, or is made to, whatever its flags say."""
    if model_type in ADAPTED:
        return True
    code = inspect.getmodule(MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]])
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(code)


def _compare(model_type: str, folder: Path, variation: Mapping[str, object]) -> None:
    config = _small(model_type, {**SIZES, **SIZES_OF_TYPE.get(model_type, {}), **variation})
    try:
        check_layer_types(config)
    except UnsupportedAttentionError as error:
        raise RefusedError(str(error)) from error
    reference = _built(config)
    if not _has_interface(model_type):
        raise RefusedError("its code has no attention interface")
    _write(reference, folder)
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    generator = torch.Generator().manual_seed(7)
    token_ids = torch.randint(3, VOCAB_SIZE, (NUM_TOKENS,), generator=generator).tolist()
    expected = _expected(folder, token_ids)
    with (
        mock.patch.object(registry, "VERIFIED", {model_type: architecture}),
        mock.patch.object(registry, "REFUSED", {}),
    ):
        for sizes in ((NUM_TOKENS,), (23, 17, 1, 1, 9, 1, 7, 1)):
            _check(folder, token_ids, sizes, expected)


def _check(folder: Path, token_ids: list[int], sizes: tuple[int, ...], expected: torch.Tensor) -> None:
    """Several sequences of other lengths beside it, in the same steps."""
    try:
        runner = make_runner(folder)
    except StartupError as error:
        reason = error.message.removeprefix(f"model {folder}: ").removesuffix(", which is not supported")
        raise RefusedError(re.sub(r"^model type \S+ (has )?", "", reason)) from error
    sequence = Progress(token_ids, [9, 3, 11, 5])
    other = Progress(token_ids[5:45], [20, 21, 22])
    for size in sizes:
        advance(runner, [sequence, other], [size, min(size, 3)])
    for position, logprobs in sequence.logprobs.items():
        difference = (logprobs - expected[position]).abs().max().item()
        if not difference < TOLERANCE:
            raise DifferentError(f"results differ from those of transformers (by {difference:.1g})")
        if logprobs.argmax() != expected[position].argmax():
            raise DifferentError("another token than that of transformers")


def _small(model_type: str, wanted: Mapping[str, object]) -> PreTrainedConfig:
    config_class = CONFIG_MAPPING[model_type]
    try:
        known = config_class().to_dict().keys() | set(config_class.attribute_map)
    except Exception as error:
        raise UnbuildableError(f"{_line(error)}") from error
    # Names that one value answers to are given once.
    sizes = {
        name: size
        for name, size in wanted.items()
        if name in known and name not in config_class.attribute_map and size is not None
    }
    try:
        return config_class(**sizes)
    except Exception as error:
        raise UnbuildableError(f"{_line(error)}") from error


def _built(config: PreTrainedConfig) -> torch.nn.Module:
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    except Exception as error:
        raise UnbuildableError(f"{_line(error)}") from error
    if size > MAX_PARAMETERS:
        raise UnbuildableError(f"the smallest one that was built has {size} parameters")
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    # Those with types of layers may have layers of attention alone, else they were refused before.
    if getattr(model, "_is_stateful", False) and not getattr(config, "layer_types", None):
        raise RefusedError("it keeps a state beside KV")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
            elif "norm" in name or name.endswith(("bias", "sinks")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def _write(model: torch.nn.Module, folder: Path) -> None:
    try:
        model.save_pretrained(folder)  # type: ignore[operator]
    except Exception as error:
        raise UnbuildableError(f"transformers cannot save it: {_line(error)}") from error
    (folder / "tokenizer.json").write_text("{}")


def _expected(folder: Path, token_ids: list[int]) -> torch.Tensor:
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    except Exception as error:
        raise UnbuildableError(f"transformers itself does not compute it: {_line(error)}") from error
    if logits.shape[-1] != VOCAB_SIZE or not logits.isfinite().all():
        raise UnbuildableError("its logits are of no use")
    return logits.float().log_softmax(-1)


@contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise UnbuildableError(f"no result within {TIMEOUT_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(TIMEOUT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:120]


def write_verified(results: Mapping[str, str], names: Mapping[str, str]) -> None:
    file = ROOT / "engine/models/verified.py"
    head = file.read_text().split("COMPARED_WITH")[0]
    verified = "".join(
        f"    {quoted(each)}: {quoted(names[each])},\n" for each, reason in sorted(results.items()) if not reason
    )
    refused = "".join(f"    {quoted(each)}: {quoted(reason)},\n" for each, reason in sorted(results.items()) if reason)
    file.write_text(
        f'{head}COMPARED_WITH = "{transformers.__version__}"  # of transformers\n\n'
        f"# Architectures by model type.\nVERIFIED: dict[str, str] = {{\n{verified}}}\n\n"
        f"# Why not, by model type.\nREFUSED: dict[str, str] = {{\n{refused}}}\n"
    )
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", str(file)], check=True)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def write_table(results: Mapping[str, str], names: Mapping[str, str]) -> None:
    file = ROOT / "docs/models.md"
    start, end = "<!-- survey: begin -->\n", "<!-- survey: end -->"
    before, _, rest = file.read_text().partition(start)
    _, _, after = rest.partition(end)
    good = [each for each, reason in sorted(results.items()) if not reason]
    table = f"With transformers {transformers.__version__}, {len(good)} are served:\n\n"
    table += "| architecture | model type |\n| --- | --- |\n"
    table += "".join(f"| `{names[each]}` | {each} |\n" for each in good)
    table += f"\n{len(results) - len(good)} are refused:\n\n| model type | why |\n| --- | --- |\n"
    table += "".join(f"| {each} | {reason.replace('|', '/')} |\n" for each, reason in sorted(results.items()) if reason)
    file.write_text(before + start + table + end + after)


def main() -> None:
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    names = candidates()
    wanted = sys.argv[1:]
    results: dict[str, str] = {}
    for model_type in wanted or names:
        with tempfile.TemporaryDirectory() as folder:
            results[model_type] = examine(model_type, Path(folder))
        print(f"{model_type}: {results[model_type] or 'equal'}", flush=True)
    if not wanted:
        write_verified(results, names)
        write_table(results, names)


if __name__ == "__main__":
    main()
