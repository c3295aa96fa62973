"""What requests know of the grammar that guides their text. `engine.guide` has the rest, with torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class GuideError(Exception):
    """The answer cannot go on in its grammar; the reason is one line.

    Every worker would come to the same end, since a guide depends on the grammar and the tokens alone. Either the
    grammar takes too much work to follow, or it refuses a token that its own mask allowed; the matcher's message does
    not tell which.
    """


class GuideState(Protocol):
    """Where one answer is in its grammar. It follows from the answer's tokens alone, so that a request that continues
    elsewhere replays them there."""

    def fork(self) -> GuideState:
        """Another guide in the same place of the grammar."""

    def follow(self, token_ids: Sequence[int], num_prompt_tokens: int) -> None:
        """Takes in the output tokens that came since the last call. `token_ids`: prompt, then output.

        Raises `GuideError` if one of them is not in the grammar.
        """

    @property
    def failure(self) -> str:
        """Why no token is allowed; empty if one is. Known once the mask was made."""
