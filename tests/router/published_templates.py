"""Chat templates as models are published with them. They come from packages that `make install` adds, so that none lies
here: those of Llama and Qwen from `trl`, which keeps copies to know models by, and those of Mistral's models from
Mistral's own package, which writes one for each version of their tokenizers."""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

OF_TRL = ("llama3", "llama3_1", "llama3_2", "qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_6")
OF_MISTRAL = ("v3 spm", "v3", "v7 spm", "v7", "v11", "v11 thinking", "v13", "v13 thinking")
NAMES = (*OF_TRL, *(f"mistral {version}" for version in OF_MISTRAL))
WITHOUT_TOOLS = ("llama3",)


@functools.cache
def published(name: str) -> str:
    """Raises `RuntimeError` if its package is missing."""
    for package in ("trl", "mistral_common"):
        if importlib.util.find_spec(package) is None:
            raise RuntimeError(f"package {package} is not installed: `make install` adds it")
    if name in OF_TRL:
        spec = importlib.util.find_spec("trl")  # the package itself would import what is not installed
        (folder,) = spec.submodule_search_locations or [] if spec else []
        return (Path(folder) / "chat_templates" / f"{name}.jinja").read_text()
    return _of_mistral(*name.split()[1:])


def _of_mistral(version: str, kind: str = "") -> str:
    from mistral_common.integrations.chat_templates.template_generator import TemplateConfig, build_chat_template
    from mistral_common.tokens.tokenizers.base import TokenizerVersion

    thinks = kind == "thinking"
    config = TemplateConfig(
        version=TokenizerVersion(version),
        spm=kind == "spm",
        thinking_support=thinks and version != "v11",
        plain_thinking_support=thinks and version == "v11",  # in plain text; later tokenizers have marks of their own
        use_special_token_variables=True,
    )
    return str(build_chat_template(config))
