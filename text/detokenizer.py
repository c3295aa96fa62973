"""Turns a growing list of tokens into text, a piece at a time, whole characters only.

A token may be a part of a character, and its text may depend on the tokens before it (a leading space). So each step
decodes a short window twice, with and without what is new, and gives the difference:

    window:   context | pending        context: the end of the prompt, then the tokens last given out
                      ^done
    new text = decode(window) less decode(context), held back while it ends in the middle of a character
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are no character (yet)
PROMPT_TAIL = 8  # tokens of context before the answer
MAX_PENDING = 4  # tokens that one unfinished character can span: UTF-8 has at most four bytes
MAX_UNFINISHED = 3  # replacements that some decoders write for one unfinished character, one for each byte


class Detokenizer:
    """One answer's text. What `add` and `flush` return, joined, is the text of all tokens; only bytes at the very end
    that never became a character are dropped. Special tokens have no text but those that are `shown`, and ids beyond
    the vocabulary have none.

    Most tokens are whole characters whose text depends on nothing (`Tokenizer.whole_text`): for them a look into a
    table does what the two decodings would. A token costs the same however many came before it, and whatever they are:
    the window stays short.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], shown: frozenset[int] = frozenset()
    ) -> None:
        self._tokenizer = tokenizer
        self._shown = shown
        with_text = (t for t in reversed(prompt_token_ids[-4 * PROMPT_TAIL :]) if tokenizer.has_text(t))
        self._begin([*islice(with_text, PROMPT_TAIL)][::-1])

    def _begin(self, window: list[int]) -> None:
        """All of `window` is out."""
        self._window = window
        self._done = len(window)  # tokens of the window whose text is out
        self._done_text = self._tokenizer.decode(window)
        self._settle()

    def _settle(self) -> None:
        """Notes whether whole characters can be added as they are: there is text before them, all of it was given out,
        and it does not end within a character."""
        is_out = self._done == len(self._window)
        self._is_settled = is_out and bool(self._done_text) and not self._done_text.endswith(REPLACEMENT)

    def add(self, token_id: int) -> str:
        """New whole characters; empty while the last one is unfinished."""
        if token_id in self._shown:
            text = self.flush()
            self._begin(self._window[self._done :])
            return text + self._tokenizer.decode([token_id], skip_special_tokens=False)
        if self._is_settled and (whole := self._tokenizer.whole_text(token_id)) is not None:
            self._window, self._done, self._done_text = [token_id], 1, whole.alone
            self._is_settled = bool(whole.alone)
            return whole.added
        if not self._tokenizer.has_text(token_id):
            return ""
        self._window.append(token_id)
        self._is_settled = False
        text = self._tokenizer.decode(self._window)
        if not text.endswith(REPLACEMENT):
            return self._advance(len(self._window), text)
        if len(self._window) - self._done <= MAX_PENDING:
            return ""
        return self._give_up(text)

    def flush(self) -> str:
        """Ends the answer: returns the rest, which is the whole characters before an unfinished one."""
        text = self._tokenizer.decode(self._window)
        return _after(self._done_text, text.rstrip(REPLACEMENT))

    def _give_up(self, text: str) -> str:
        """Too many tokens for one character: the earliest are bytes that no later token can complete."""
        for end in range(self._done + 1, len(self._window)):
            part = self._tokenizer.decode(self._window[:end])
            if text.startswith(part) and len(part) > len(self._done_text):
                return self._advance(end, part)
        # No token ends at the end of a character: whole characters are shown, and the window begins anew after them.
        unfinished = text[len(text.rstrip(REPLACEMENT)) :][-MAX_UNFINISHED:]
        whole = text.removesuffix(unfinished)
        if len(whole) <= len(self._done_text):  # nothing but bytes that are no character
            whole, unfinished = text, ""
        self._window = self._window[-MAX_PENDING:]
        self._done = len(self._window)
        new, self._done_text = _after(self._done_text, whole), self._tokenizer.decode(self._window)
        self._done_text = self._done_text.removesuffix(unfinished)
        return new

    def _advance(self, end: int, text: str) -> str:
        """`text` is that of the window up to `end`, and all of it is out now."""
        new = _after(self._done_text, text)
        del self._window[: self._done]  # the tokens just given out are the next step's context
        self._done = end - self._done
        self._done_text = self._tokenizer.decode(self._window[: self._done])
        self._settle()
        return new


def _after(done: str, text: str) -> str:
    if text.startswith(done):
        return text[len(done) :]
    # The done text ended in a part of a character (a prompt of token ids may), which new tokens turned into another.
    common = 0
    for left, right in zip(done, text, strict=False):
        if left != right:
            break
        common += 1
    return text[common:]
