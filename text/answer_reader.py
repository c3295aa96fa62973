"""One answer as its tokens come: text, reasoning and calls of tools apart. Knows no worker, and no interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.sampling import SamplingParams
from common.types import FinishReason, SampledToken
from text.answer_parts import PartsParser, Pieces, Reading, ended
from text.answer_text import AnswerText, NewText
from text.tokenizer import Tokenizer


@dataclass(slots=True)
class NewParts:
    """What some new tokens add to an answer."""

    pieces: Pieces
    num_tokens: int  # of the new ones that belong to the answer
    num_reasoning_tokens: int = 0
    finish_reason: FinishReason | None = None  # set with the answer's last tokens
    stop_reason: str | int | None = None  # as `NewText` has it
    is_cut: bool = False  # the answer ended in the middle of a call


class AnswerReader:
    """`parser` is None, and all is text, if there is no `reading`."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams, reading: Reading | None
    ) -> None:
        self.text = AnswerText(tokenizer, prompt_token_ids, params, reading)
        self.parser = reading.parser() if reading else None

    def add(
        self, tokens: Sequence[SampledToken], finish_reason: FinishReason | None, stop_token_id: int | None
    ) -> NewParts:
        """`finish_reason` and `stop_token_id` are what the engine says; None while it goes on. The answer ends earlier
        at a stop string, or if it may not have what follows."""
        if self.parser is not None:
            return self._in_parts(self.parser, tokens, finish_reason, stop_token_id)
        new = self.text.add(tokens, finish_reason, stop_token_id)
        pieces = Pieces()
        pieces.add_text(new.text)
        return NewParts(pieces, new.num_tokens, 0, new.finish_reason, new.stop_reason)

    def _in_parts(
        self,
        parser: PartsParser,
        tokens: Sequence[SampledToken],
        finish_reason: FinishReason | None,
        stop_token_id: int | None,
    ) -> NewParts:
        """Tokens are read one by one: the same tokens give the same answer, however many come together."""
        new, end = NewParts(Pieces(), len(tokens)), None
        for index, token in enumerate(tokens, 1):
            piece = self.text.add((token,), None, None)
            given = parser.add(piece.text)
            new.num_reasoning_tokens += bool(given.reasoning)
            new.pieces.extend(given)
            if piece.finish_reason is not None or parser.is_done:
                end = NewText("", 1, piece.finish_reason or FinishReason.STOP, piece.stop_reason)
                new.num_tokens = index
                break
        if end is None and finish_reason is not None:
            end = self.text.add((), finish_reason, stop_token_id)
            new.pieces.extend(parser.add(end.text))
        if end is not None and end.finish_reason is not None:
            new.pieces.extend(parser.end())
            new.finish_reason, new.stop_reason = ended(parser, end.finish_reason), end.stop_reason
            new.is_cut = parser.is_cut
        return new
