"""What config.json says is honoured or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from common.errors import StartupError
from engine.local.device import LocalDevice
from tests.engine.test_model_families import check
from tests.engine.tiny_models import FAMILIES, advance, edit_config, make_model, make_runner, random_sequences


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama", {"quantization_config": {"quant_method": "bitsandbytes"}}, "quantization_config"),
        ("llama", {"sliding_window": 7}, "sliding_window 7"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1.0, "partial_rotary_factor": 0.5}},
            "part",
        ),
        ("llama", {"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, "spiral"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1.0, "short_factor": [1]}},
            "long_factor",
        ),
        ("mistral", {"layer_types": ["full_attention"] * 3}, "layer_types"),
        ("mistral", {"hidden_act": "relu"}, "relu"),
        ("qwen2", {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("qwen2", {"layer_types": ["linear_attention"] * 3}, "layer_types"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"attn_logit_softcapping": 3.0}, "attn_logit_softcapping"),
        ("gemma3", {"architectures": ["Gemma3ForConditionalGeneration"]}, "text_config"),
        ("mixtral", {"num_experts_per_tok": "two"}, "num_experts_per_tok"),
        ("phi3", {"num_attention_heads": 3, "hidden_size": 63}, "num_key_value_heads"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(
    tmp_path: Path, family: str, changes: dict[str, object], words: str
) -> None:
    path = make_model(tmp_path / family, FAMILIES[family])
    edit_config(path, **changes)
    with pytest.raises(StartupError) as caught:
        make_runner(path)
    assert words in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("key", ["attention_dropout", "initializer_range", "_name_or_path", "unsloth_version"])
def test_what_has_no_effect_is_taken(tmp_path: Path, key: str) -> None:
    path = make_model(tmp_path / "llama")
    edit_config(path, **{key: 0.5})
    make_runner(path)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("value", ["auto", "half", "int3"])
@pytest.mark.parametrize("model_type", ["llama", "olmo2"])  # Baton's own, and on transformers' code
def test_a_dtype_that_torch_lacks_says_nothing(tmp_path: Path, model_type: str, value: str, key: str) -> None:
    path = make_model(tmp_path / model_type, {"model_type": model_type})
    (sequence,) = random_sequences([20])
    config = json.loads((path / "config.json").read_text())
    config.pop("dtype")
    (path / "config.json").write_text(json.dumps({**config, key: value}))
    advance(make_runner(path), [sequence], [20])
    (path / "config.json").write_text(json.dumps(config))
    check(path, sequence)


def test_windows_that_a_checkpoint_does_not_use_are_nothing(tmp_path: Path) -> None:
    """Published checkpoints of Qwen3 with experts say `max_window_layers`, which their class does not know."""
    path = make_model(tmp_path / "qwen3_moe", FAMILIES["qwen3_moe"])
    edit_config(path, max_window_layers=48, use_sliding_window=False)
    make_runner(path)
    edit_config(path, use_sliding_window=True, sliding_window=16)
    with pytest.raises(StartupError, match=r"max_window_layers|sliding_window"):
        make_runner(path)


def test_defaults_are_those_of_transformers(tmp_path: Path) -> None:
    """A config.json with the flags alone that differ from them, as some hubs have it."""
    path = make_model(tmp_path / "gemma2", {**FAMILIES["gemma2"], "attn_logit_softcapping": 50.0})
    config = json.loads((path / "config.json").read_text())
    for key in ("attn_logit_softcapping", "rope_parameters", "tie_word_embeddings", "layer_types", "rms_norm_eps"):
        del config[key]
    (path / "config.json").write_text(json.dumps(config))
    runner = make_runner(path)
    (sequence,) = random_sequences([50])
    advance(runner, [sequence], [50])
    check(path, sequence)


def long_and_short(tmp_path: Path) -> tuple[Path, LocalDevice, LocalDevice]:
    path = make_model(tmp_path / "phi", {**FAMILIES["phi3_partial"], "original_max_position_embeddings": 64})
    return path, make_runner(path), make_runner(path, max_model_len=64)


def test_longrope_is_chosen_by_the_longest_sequence(tmp_path: Path) -> None:
    """As transformers chooses for a sequence of that length."""
    path, long, short = long_and_short(tmp_path)
    (sequence,) = random_sequences([100])
    for size in (70, 30):
        advance(long, [sequence], [size])
    check(path, sequence)
    (sequence,) = random_sequences([60])
    for size in (40, 20):
        advance(short, [sequence], [size])
    check(path, sequence)


def test_kv_of_another_longrope_is_another_models(tmp_path: Path) -> None:
    _, long, short = long_and_short(tmp_path)
    assert long.info.spec.fingerprint() != short.info.spec.fingerprint()


@pytest.mark.parametrize("flag", ["sliding_window", "query_pre_attn_scalar", "rope_parameters"])
def test_kv_of_another_config_is_another_models(tmp_path: Path, flag: str) -> None:
    path = make_model(tmp_path / "gemma3", FAMILIES["gemma3"])
    before = make_runner(path).info.spec.fingerprint()
    config = json.loads((path / "config.json").read_text())
    value = config[flag]
    if isinstance(value, dict):
        value["sliding_attention"]["rope_theta"] += 1
    edit_config(path, **{flag: value if isinstance(value, dict) else value + 1})
    assert make_runner(path).info.spec.fingerprint() != before
