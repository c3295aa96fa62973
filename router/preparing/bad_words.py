"""Words that a client bans, as sequences of the model's tokens."""

from __future__ import annotations

from functools import lru_cache

from common.errors import InvalidArgumentError
from common.sampling import MAX_BANNED_SEQUENCES, MAX_BANNED_TOKENS, FieldName, SamplingParams, TokenSequence
from router.fleet.served_model import ServedModel
from text.tokenizer import Tokenizer


def bad_words_ids(model: ServedModel, params: SamplingParams, name: FieldName) -> tuple[TokenSequence, ...]:
    """The sequences that the client gave, and those of each bad word, with and without a space before it."""
    try:
        sequences = tuple(dict.fromkeys((*params.bad_words_ids, *_written(model.tokenizer, params.bad_words))))
    except ValueError as error:
        raise InvalidArgumentError(name("bad_words"), str(error)) from None
    if len(sequences) > MAX_BANNED_SEQUENCES:
        raise InvalidArgumentError(
            name("bad_words"),
            f"with bad_words_ids these are {len(sequences)} sequences of tokens: {MAX_BANNED_SEQUENCES} are the most",
        )
    return sequences


@lru_cache(maxsize=8)  # all prompts of a body have the same words
def _written(tokenizer: Tokenizer, words: tuple[str, ...]) -> tuple[TokenSequence, ...]:
    """Raises `ValueError` at the first word that is too long."""
    sequences = []
    for word in words:
        for text in (word, f" {word}"):
            token_ids = tokenizer.encode(text, add_special_tokens=False)
            if len(token_ids) > MAX_BANNED_TOKENS:
                raise ValueError(f"{word[:40]!r} has {len(token_ids)} tokens: {MAX_BANNED_TOKENS} are the most")
            sequences.append(TokenSequence(token_ids=tuple(token_ids)))
    return tuple(sequences)
