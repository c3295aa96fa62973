"""Models of text and images whose text part is one of Baton's own decoders: that part is served, without images."""

from __future__ import annotations

from collections.abc import Mapping

from common.errors import StartupError
from common.model_files import ModelFiles, read_safetensors_header
from engine.loading.checkpoints.hf_quantized import QUANTIZATION_KEYS
from engine.models.config_classes import find_config_class
from engine.models.families import FAMILIES

COMPOSITES = frozenset(
    {"Gemma3ForConditionalGeneration", "LlavaForConditionalGeneration", "Mistral3ForConditionalGeneration"}
    | {f"{qwen}ForConditionalGeneration" for qwen in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL")}
)
# Families by the model type of the text part. Those of Qwen have three positions for a token, which are equal in text.
_FAMILIES = {family.model_type: name for name, family in FAMILIES.items()} | {
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
_OF_THREE_POSITIONS = ("mrope_section", "mrope_interleaved", "type")  # keys of rope_parameters

# By what names begin with in a checkpoint: as published, and as newer versions of transformers have them in memory.
_TEXT = {"language_model.model.": "model.", "language_model.lm_head.": "lm_head.", "model.language_model.": "model."}
_OTHERS = tuple(
    f"{outer}{part}." for outer in ("", "model.") for part in ("vision_tower", "multi_modal_projector", "visual")
)


def is_composite(config: Mapping[str, object]) -> bool:
    """If config.json is that of a model whose text part is served."""
    names = config.get("architectures")
    return isinstance(names, list) and not COMPOSITES.isdisjoint(names)


def text_architecture(config: Mapping[str, object]) -> str:
    """The architecture of a composite's text part, one of `FAMILIES`. Raises `StartupError` if it is none."""
    model_type = _text_part(config)["model_type"]
    if not isinstance(model_type, str) or model_type not in _FAMILIES:
        raise StartupError(f"config.json: text_config of model type {model_type!r} is not supported")
    return _FAMILIES[model_type]


def text_config(files: ModelFiles) -> dict[str, object]:
    """config.json as a composite's text part alone would have it.

    Whether the head is the embedding is what the files say: classes of composites and of their parts do not agree.
    Raises `StartupError` if the files have no head although config.json says that the head is not the embedding.
    """
    text = _text_part(files.config)
    rope = text.get("rope_parameters")
    if isinstance(rope, dict) and "mrope_section" in rope:
        text["rope_parameters"] = {key: value for key, value in rope.items() if key not in _OF_THREE_POSITIONS}
    quantization = {key: files.config[key] for key in QUANTIZATION_KEYS if key in files.config}
    names = [name for file in files.weight_files for name in read_safetensors_header(file)[0]]
    has_head = any((text_name(name) or "").startswith("lm_head.") for name in names)  # a quantised one has no weight
    if not has_head and _is_untied(files.config):
        raise StartupError(f"model {files.path} lacks tensors lm_head.*; config.json has tie_word_embeddings false")
    return {**text, **quantization, "tie_word_embeddings": not has_head}


def _is_untied(config: Mapping[str, object]) -> bool:
    """If config.json itself says so, and not only a default of a class. transformers ties if either part says so."""
    text = config.get("text_config")
    parts = [config, text] if isinstance(text, Mapping) else [config]
    said = [part["tie_word_embeddings"] for part in parts if "tie_word_embeddings" in part]
    return bool(said) and not any(said)


def _text_part(config: Mapping[str, object]) -> dict[str, object]:
    """The text part's config, with the defaults that the composite's class of transformers gives it: old files have no
    text_config."""
    try:
        composite = find_config_class(str(config.get("model_type"))).from_dict(dict(config))
        part: dict[str, object] = composite.text_config.to_dict()
    except Exception as error:  # of many classes, some of them private
        raise StartupError(f"config.json: {' '.join(str(error).split())}") from error
    return part


def text_name(name: str) -> str | None:
    """The name that a composite's tensor has in its text part; None if it belongs to another part."""
    for prefix, new in _TEXT.items():
        if name.startswith(prefix):
            return new + name.removeprefix(prefix)
    return None if name.startswith(_OTHERS) else name
