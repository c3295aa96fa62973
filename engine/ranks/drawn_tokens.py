"""The way of drawn tokens back to the first stage, which embeds them.

A step may be sent to the stages before the step that draws its first tokens has ended (`engine.step.Drawn`). The first
stage begins it, and waits there for the tokens that rank 0 tells it as soon as they are drawn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from common.errors import InternalError
from common.types import SampledToken
from engine.ranks.messages import Channel, Message, Step, Tokens
from engine.step import Drawn, StepRow

KEPT_STEPS = 4  # whose tokens are still known: two steps are under way at most, and begin with those of a step before


class ToldTokens:
    """Rank 0's end: tells the tokens that are asked for, once they are drawn. Its callers see to it that only one
    thread at a time is here."""

    def __init__(self, tell: Callable[[Tokens], None]) -> None:
        self._tell = tell
        self._known: dict[int, dict[int, int | None]] = {}  # by step and row
        self._asked: dict[int, set[int]] = {}  # rows, by step, that have not drawn yet

    def ask(self, rows: Iterable[StepRow]) -> None:
        """Asks for the tokens that the rows of a step begin with. Raises `InternalError` if one of them is not known
        any more."""
        drawn: dict[int, list[int]] = {}
        for first in (row.first for row in rows if row.first is not None):
            if first.row in self._known.get(first.step, {}):
                drawn.setdefault(first.step, []).append(first.row)
            elif first.step < max(self._known, default=0):
                raise InternalError(f"row {first.row} of step {first.step} drew no token that is still known")
            else:
                self._asked.setdefault(first.step, set()).add(first.row)
        for step, some in drawn.items():
            self._tell_rows(step, some)

    def drew(self, step: int, rows: Sequence[int], tokens: Sequence[SampledToken | None]) -> None:
        """Some rows of a step drew these tokens."""
        for old in [number for number in self._known if number <= step - KEPT_STEPS]:
            del self._known[old]
        ids = [None if token is None else token.token_id for token in tokens]
        self._known.setdefault(step, {}).update(zip(rows, ids, strict=True))
        if asked := self._asked.get(step):
            self._tell_rows(step, [row for row in rows if row in asked])
            asked.difference_update(rows)
            if not asked:
                del self._asked[step]

    def _tell_rows(self, step: int, rows: Sequence[int]) -> None:
        if rows:
            known = self._known[step]
            self._tell(Tokens(step, list(rows), [known[row] for row in rows]))


class StepsAndTokens:
    """What rank 0 sends to another rank: steps, and between them tokens for steps that came before or come later."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._steps: deque[Step] = deque()  # read while tokens were waited for
        self._tokens: dict[int, dict[int, int | None]] = {}  # by step and row that drew them

    def next_step(self) -> Step:
        """Waits for it. Raises as `Channel.receive` does, and `ValueError` for another message."""
        while not self._steps:
            self._read()
        step = self._steps.popleft()
        for old in [number for number in self._tokens if number < step.number - KEPT_STEPS]:
            del self._tokens[old]
        return step

    def token(self, drawn: Drawn) -> int:
        """The token that a row drew; waits for it. Raises as `next_step`, and `InternalError` if it drew none."""
        while drawn.row not in self._tokens.get(drawn.step, {}):
            self._read()
        token = self._tokens[drawn.step][drawn.row]
        if token is None:
            raise InternalError(f"row {drawn.row} of step {drawn.step} drew no token")
        return token

    def _read(self) -> None:
        message: Message
        message, _ = self._channel.receive()
        match message:
            case Step():
                self._steps.append(message)
            case Tokens(step, rows, token_ids):
                self._tokens.setdefault(step, {}).update(zip(rows, token_ids, strict=True))
            case _:
                raise ValueError(f"rank 0 said {type(message).__name__}")
