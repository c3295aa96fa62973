"""Compiles a grammar on trial, and follows it a few tokens, to find out what it costs and whether it can be used.

For the child of `common.grammar_process`: what a client wrote may end the process that this runs in.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLTokenizer

from common.guided import Guided, grammar_error, grammar_of, parser_limits

if TYPE_CHECKING:
    from common.grammar_process import ModelTokens

NUM_STARTS = 4  # tokens that are tried where the text is free for the first time
MAX_FORCED = 4096  # tokens that the trial follows to get there

_ANY_BIT = re.compile(rb"[^\0]")


class Trial:
    """Compiles for one model's tokens; without any, for bytes."""

    def __init__(self, tokens: ModelTokens | None) -> None:
        self._knows_tokens = tokens is not None
        self._tokenizer = LLTokenizer("byte") if tokens is None else read_tokenizer(tokens)

    def __call__(self, guided: Guided) -> tuple[str, int]:
        """The grammar for llguidance, and the bytes that it takes, about. Raises `ValueError` with a reason."""
        grammar = grammar_of(guided)
        if error := LLMatcher.validate_grammar(grammar):
            raise ValueError(grammar_error(guided, error))
        before = _resident_bytes()
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits())
        if matcher.is_error() and not self._knows_tokens and "token" in matcher.get_error():
            return grammar, 0  # it names tokens of a model
        if error := self._error_at_the_beginning(matcher):
            raise ValueError(grammar_error(guided, error))
        return grammar, max(0, _resident_bytes() - before)

    def _error_at_the_beginning(self, matcher: LLMatcher) -> str:
        """Goes on to where the text is free for the first time, and from there with some tokens that are allowed. The
        error that comes on the way, if any does."""
        matcher.compute_bitmask()
        _follow_forced(matcher)
        if matcher.is_error():
            return matcher.get_error()
        mask = matcher.compute_bitmask()
        if matcher.is_error():
            return matcher.get_error()
        for token in _some_of(mask):
            if token in self._tokenizer.eos_tokens or self._tokenizer.is_special_token(token):
                continue
            ahead = matcher.deep_copy()
            ahead.consume_token(token)
            _follow_forced(ahead)
            ahead.compute_ff_tokens()  # what follows that
            if ahead.is_error():
                return ahead.get_error()
        return ""


def read_tokenizer(tokens: ModelTokens) -> LLTokenizer:
    """Raises `ValueError` if it is of no use."""
    ends = list(tokens.eos_token_ids)
    try:
        return LLTokenizer(tokens.file, n_vocab=tokens.vocab_size, eos_token=ends)
    except ValueError:  # the model may lack logits for the last tokens: those are cut off the masks
        return LLTokenizer(tokens.file, eos_token=ends)


def _follow_forced(matcher: LLMatcher) -> None:
    """Goes on through the text that has to come. Not through a special token that it spells: that is refused."""
    forced = matcher.compute_ff_tokens()[:MAX_FORCED]
    if forced and (num_taken := matcher.validate_tokens(forced)) > 0:
        matcher.consume_tokens(forced[:num_taken])


def _some_of(mask: bytes) -> list[int]:
    """Up to NUM_STARTS tokens of which `mask` has the bit, from all over the vocabulary."""
    found = [8 * one.start() + bit for one in _ANY_BIT.finditer(mask) for bit in range(8) if one.group()[0] >> bit & 1]
    return found[:: max(1, -(-len(found) // NUM_STARTS))]


def _resident_bytes() -> int:
    """0 if the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0
