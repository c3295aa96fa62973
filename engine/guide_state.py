"""What requests know of the grammar that guides their text. `engine.guide` has the rest, with torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class GuideError(Exception):
    """The answer cannot go on in its grammar; the reason is one line.

    So it would be on every worker: a guide follows from the grammar and the tokens alone. The grammar may be too much
    to follow, or may not take what its own mask allowed; what the matcher says does not tell one from the other.
    """


class GuideState(Protocol):
    """Where one answer is in its grammar. It follows from the answer's tokens alone, so that a request that continues
    elsewhere replays them there."""

    def fork(self) -> GuideState:
        """Another one, that is where this one is now."""

    def follow(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Takes in the output tokens that came since the last call. `token_ids`: prompt, then output.

        Raises `GuideError` if one of them is not in the grammar.
        """

    @property
    def failure(self) -> str:
        """Why no token may come; empty if one may. Known after its mask was made."""
