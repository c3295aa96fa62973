"""The text of one answer, as its tokens come. Knows no worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.sampling import SamplingParams
from common.types import FinishReason, SampledToken
from text.answer_parts import Reading
from text.detokenizer import Detokenizer
from text.stop_strings import StopStrings
from text.tokenizer import Tokenizer


@dataclass(slots=True)
class NewText:
    """What some new tokens add to an answer. Not frozen: that would triple what it costs to make one for each token."""

    text: str  # whole characters; may lag behind the tokens
    num_tokens: int  # of the new ones that belong to the answer: a stop string ends it before the rest
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string, or the stop token's id, that ended it


class AnswerText:
    """Whole characters, up to the first stop string, which is a part of them if the client wants it."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams, reading: Reading | None
    ) -> None:
        shown: frozenset[int] = reading.shown_token_ids if reading else frozenset()
        self._detokenizer = Detokenizer(tokenizer, prompt_token_ids, shown)
        self._stops = StopStrings(params.stop, is_shown=params.include_stop_str_in_output)
        self._params = params
        self.may_stop = bool(params.stop)  # at a stop string, at any token
        self.num_tokens = 0  # of the answer so far

    def more(self, tokens: Sequence[SampledToken]) -> str:
        """Gives what `add` gives, for tokens that do not end the answer, if it cannot stop at a stop string."""
        self.num_tokens += len(tokens)
        if len(tokens) == 1:
            return self._detokenizer.add(tokens[0].token_id)
        return "".join([self._detokenizer.add(token.token_id) for token in tokens])

    def add(
        self, tokens: Sequence[SampledToken], finish_reason: FinishReason | None, stop_token_id: int | None
    ) -> NewText:
        """`finish_reason` and `stop_token_id` are what the engine says; None while it goes on."""
        if finish_reason is None and not self.may_stop:
            return NewText(self.more(tokens), len(tokens))
        texts: list[str] = []
        for index, token in enumerate(tokens):
            self.num_tokens += 1
            result = self._stops.add(self._detokenizer.add(token.token_id), armed=self._is_armed)
            texts.append(result.text)
            if result.matched is not None:
                return NewText("".join(texts), index + 1, FinishReason.STOP, result.matched)
        if finish_reason is None:
            return NewText("".join(texts), len(tokens))
        # At the end, text that was held back belongs to the answer, unless its last characters complete a stop string.
        result = self._stops.add(self._detokenizer.flush(), armed=self._is_armed)
        texts.append(result.text)
        if result.matched is not None:
            return NewText("".join(texts), len(tokens), FinishReason.STOP, result.matched)
        texts.append(self._stops.flush())
        # A token that the client asked to stop at; the model's own end needs no mention.
        stop_reason = stop_token_id if stop_token_id in self._params.stop_token_ids else None
        return NewText("".join(texts), len(tokens), finish_reason, stop_reason)

    @property
    def _is_armed(self) -> bool:
        return self.num_tokens > self._params.min_tokens
