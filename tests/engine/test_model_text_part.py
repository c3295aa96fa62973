"""Models of text and images whose text part is served."""

from __future__ import annotations

import json
import logging
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText

from common.errors import StartupError
from common.model_files import open_model
from engine.local.memory import weight_bytes
from engine.models.decoder import Decoder
from engine.models.text_part import text_config
from tests.engine.tiny_models import Progress, advance, edit_config, make_runner

VOCAB_SIZE = 96
TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "eos_token_id": 7,
}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
IMAGE = {"image_size": 28, "patch_size": 14}
QWEN = {name: size for name, size in TEXT.items() if name != "head_dim"}
QWEN_VISION: dict[str, object] = {"hidden_size": 32, "intermediate_size": 32, "depth": 1, "num_heads": 2}
PARTS: dict[str, dict[str, dict[str, object]]] = {
    # Scaled positions in the old spelling, as published.
    "gemma3": {
        "text_config": {
            **TEXT,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
        "vision_config": {**VISION, **IMAGE},
    },
    "mistral3": {
        "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
        "vision_config": {**VISION, **IMAGE, "head_dim": 16},
    },
    "llava": {
        "text_config": {**TEXT, "model_type": "llama"},
        "vision_config": {"model_type": "clip_vision_model", **VISION, **IMAGE, "projection_dim": 16},
    },
    # Positions in three directions, which are equal in text.
    "qwen2_vl": {
        "text_config": {**QWEN, "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}},
        "vision_config": {"depth": 1, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2, "hidden_size": 64},
    },
    "qwen2_5_vl": {
        "text_config": {**QWEN, "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}},
        "vision_config": {**QWEN_VISION, "out_hidden_size": 64},
    },
    "qwen3_vl": {
        "text_config": {
            **QWEN,
            "head_dim": 16,
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]},
        },
        "vision_config": {
            **QWEN_VISION,
            "out_hidden_size": 64,
            "deepstack_visual_indexes": [0],
            "num_position_embeddings": 16,
        },
    },
}


def make(path: Path, model_type: str) -> Path:
    torch.manual_seed(5)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(model_type, **PARTS[model_type]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "language_model" in name and parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) * 0.2)
            elif "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


def rename(path: Path, old: str, new: str) -> None:
    file = path / "model.safetensors"
    tensors = {name.replace(old, new, 1): tensor for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "is_tied", [pytest.param(True, id="tied"), pytest.param(False, id="a head of its own", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("model_type", PARTS)
def test_text_alone_is_computed_alike(
    tmp_path: Path, model_type: str, is_tied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = make(tmp_path / "model", model_type)
    file = path / "model.safetensors"
    tensors = load_file(file)
    (embedding,) = [name for name in tensors if name.endswith(".embed_tokens.weight")]
    head = "language_model.lm_head.weight" if embedding.startswith("language_model.") else "lm_head.weight"
    tensors.pop(head, None)
    if not is_tied:
        tensors[head] = torch.randn(tensors[embedding].shape, generator=torch.Generator().manual_seed(1)) * 0.2
    save_file(tensors, file, metadata={"format": "pt"})
    text = {**AutoConfig.from_pretrained(path).to_dict()["text_config"], "tie_word_embeddings": is_tied}
    edit_config(path, tie_word_embeddings=is_tied, text_config=text)

    tokens = torch.randint(3, VOCAB_SIZE, (60,), generator=torch.Generator().manual_seed(7)).tolist()
    load = partial(AutoModelForImageTextToText.from_pretrained, dtype=torch.float32, attn_implementation="eager")
    reference, found = load(path, output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)

    with caplog.at_level(logging.INFO):
        runner = make_runner(path)
    assert "the text part of the model is served, without images" in caplog.text
    assert isinstance(runner._model, Decoder)
    sequence = Progress(tokens, [9, 3, 11, 5])
    for size in (33, 17, 1, 9):
        advance(runner, [sequence], [size])
    for position, logprobs in sequence.logprobs.items():
        torch.testing.assert_close(logprobs, expected[position], atol=2e-4, rtol=0)


@pytest.mark.parametrize("kind", ["qweight", "weight_packed", "weight"])
@pytest.mark.parametrize("prefix", ["language_model.", ""])
def test_a_quantised_head_is_a_head(tmp_path: Path, prefix: str, kind: str) -> None:
    """Else the embedding would take its place, and logits be wrong without an error."""
    path = make(tmp_path / "model", "gemma3")
    tensors = load_file(path / "model.safetensors")
    tensors[f"{prefix}lm_head.{kind}"] = torch.zeros(8, 12, dtype=torch.int32)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert text_config(open_model(path))["tie_word_embeddings"] is False


@pytest.mark.parametrize("part", ["", "text_config"])
def test_a_head_that_config_asks_for_and_no_file_has(tmp_path: Path, part: str) -> None:
    path = make(tmp_path / "model", "gemma3")
    config = json.loads((path / "config.json").read_text())
    for each in (config, config["text_config"]):
        each.pop("tie_word_embeddings", None)
    (config[part] if part else config)["tie_word_embeddings"] = False
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(StartupError, match=r"lacks tensors lm_head\.\*; config.json has tie_word_embeddings false"):
        make_runner(path)


@pytest.mark.parametrize("model_type", ["gemma3", "qwen2_5_vl"])
def test_only_the_text_part_takes_memory(tmp_path: Path, model_type: str) -> None:
    path = make(tmp_path / "model", model_type)
    text = [tensor for name, tensor in load_file(path / "model.safetensors").items() if is_of_text(name)]
    assert weight_bytes(open_model(path), 2) == 2 * sum(tensor.numel() for tensor in text)


def is_of_text(name: str) -> bool:
    return not any(part in name for part in ("vision", "visual", "projector"))


def test_names_of_newer_files(tmp_path: Path) -> None:
    """As transformers has them in memory."""
    path = make(tmp_path / "model", "gemma3")
    prompt = list(range(3, 40))

    def last(path: Path) -> torch.Tensor:
        sequence = Progress(prompt, [9, 3, 11])
        advance(make_runner(path), [sequence], [len(prompt)])
        return sequence.logprobs[len(prompt) - 1]

    expected = last(path)
    rename(path, "language_model.model.", "model.language_model.")
    rename(path, "vision_tower.", "model.vision_tower.")
    assert any(name.startswith("model.vision_tower.") for name in load_file(path / "model.safetensors"))
    torch.testing.assert_close(last(path), expected, atol=0, rtol=0)


def test_a_tensor_that_is_missing_or_unknown_is_named(tmp_path: Path) -> None:
    path = make(tmp_path / "model", "gemma3")
    rename(path, "language_model.model.norm.", "language_model.model.other.")
    with pytest.raises(StartupError, match=r"tensor language_model\.model\.other\.weight, which this architecture"):
        make_runner(path)
    rename(path, "language_model.model.other.", "vision_tower.norm.")
    with pytest.raises(StartupError, match=r"lacks tensor model\.norm\.weight"):
        make_runner(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ({"model_type": "falcon"}, "text_config of model type 'falcon' is not supported"),
        (3, ""),
        ({"model_type": 3}, ""),
    ],
)
def test_another_text_part_is_refused(tmp_path: Path, text: object, reason: str) -> None:
    path = make(tmp_path / "model", "llava")
    edit_config(path, text_config=text)
    with pytest.raises(StartupError, match=f"config.json: {reason}"):
        make_runner(path)


def test_a_config_in_one_piece(tmp_path: Path) -> None:
    """As Qwen's were published first: what is of the text stands beside the rest."""
    path = make(tmp_path / "model", "qwen2_5_vl")
    config = json.loads((path / "config.json").read_text())
    text = config.pop("text_config")
    rope = {"type": "mrope", "mrope_section": [4, 2, 2]}
    flat = {**text, "rope_theta": 1000000.0, "rope_scaling": rope, **config}
    flat.pop("rope_parameters")
    expected = text_config(open_model(path))
    (path / "config.json").write_text(json.dumps(flat))
    assert text_config(open_model(path)) == expected
    make_runner(path)


def test_its_text_part_says_what_ends_a_sequence(tmp_path: Path) -> None:
    path = make(tmp_path / "model", "llava")
    (path / "generation_config.json").unlink(missing_ok=True)
    assert open_model(path).eos_token_ids == [7]
