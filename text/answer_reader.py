"""One answer as its tokens come: text, reasoning and calls of tools apart. Knows no worker, and no interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.sampling import SamplingParams
from common.types import FinishReason, SampledToken
from text.answer_parts import PartsParser, Pieces, Reading, ended
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
        self._stops = StopStrings(params.stop, is_shown=params.include_stop_str_in_output) if params.stop else None
        self._params = params
        self.may_stop = self._stops is not None  # at a stop string, at any token
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
        # A token that the client asked to stop at; the model's own end needs no mention.
        stop_reason = stop_token_id if stop_token_id in self._params.stop_token_ids else None
        if (stops := self._stops) is None:
            text = self.more(tokens) if finish_reason is None else self.more(tokens) + self._detokenizer.flush()
            return NewText(text, len(tokens), finish_reason, stop_reason)
        texts: list[str] = []
        for index, token in enumerate(tokens):
            self.num_tokens += 1
            result = stops.add(self._detokenizer.add(token.token_id), armed=self._is_armed)
            texts.append(result.text)
            if result.matched is not None:
                return NewText("".join(texts), index + 1, FinishReason.STOP, result.matched)
        if finish_reason is None:
            return NewText("".join(texts), len(tokens))
        # At the end, text that was held back belongs to the answer, unless its last characters complete a stop string.
        result = stops.add(self._detokenizer.flush(), armed=self._is_armed)
        texts.append(result.text)
        if result.matched is not None:
            return NewText("".join(texts), len(tokens), FinishReason.STOP, result.matched)
        texts.append(stops.flush())
        return NewText("".join(texts), len(tokens), finish_reason, stop_reason)

    @property
    def _is_armed(self) -> bool:
        return self.num_tokens > self._params.min_tokens


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
