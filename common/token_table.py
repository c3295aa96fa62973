"""The tokens of a tokenizer.json, without the tokenizers library."""

from __future__ import annotations

import json
from pathlib import Path

from common.errors import StartupError


def read_token_ids(file: Path) -> dict[str, int]:
    """The id of each token, control tokens and other added ones included; empty for a kind of tokenizer that has no
    such table. Raises `StartupError` that names the file."""
    try:
        definition = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise StartupError(f"{file} cannot be read as JSON ({error}); download it again") from error
    definition = definition if isinstance(definition, dict) else {}
    model = definition.get("model")
    vocab = model.get("vocab") if isinstance(model, dict) else None
    ids: dict[str, int] = {}
    if isinstance(vocab, dict):
        ids = {token: token_id for token, token_id in vocab.items() if isinstance(token_id, int)}
    elif isinstance(vocab, list):  # [token, score] of each id
        ids = {str(entry[0]): token_id for token_id, entry in enumerate(vocab) if isinstance(entry, list) and entry}
    added = definition.get("added_tokens")
    for entry in added if ids and isinstance(added, list) else ():  # a part of the tokens would be taken for all
        if isinstance(entry, dict) and isinstance(entry.get("id"), int):
            ids[str(entry.get("content"))] = entry["id"]
    return ids
