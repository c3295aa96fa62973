"""When running requests will have made room for newcomers, as far as the lengths of earlier answers tell. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from engine.messages import RequestMode
from engine.request import Request

FORGET = 1 / 32  # weight of the latest answer in the mean length
LONGER = 1.25  # an answer that is longer than the mean is expected to become so many times as long as it is


class Room:
    """The mean length of answers that ended here, and how far running ones are from it."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._mean_tokens: float | None = None  # None: no answer has ended yet

    def ended(self, num_output_tokens: int) -> None:
        """An answer is complete."""
        mean = self._mean_tokens
        self._mean_tokens = num_output_tokens if mean is None else mean + FORGET * (num_output_tokens - mean)

    def after(self, running: Iterable[Request], num_before: int) -> tuple[int, ...]:
        """`WorkerLoad.room_after`, if there is no room now and so many wait for it; empty if nobody knows how long
        answers are."""
        if self._mean_tokens is None:
            return ()
        return self.after_tokens([self._num_left(one) for one in running], num_before)

    def after_tokens(self, num_left: Iterable[int], num_before: int) -> tuple[int, ...]:
        """`after`, if running requests are expected to draw so many tokens before they give their places up."""
        if (mean := self._mean_tokens) is None:
            return ()
        left = sorted(num_left)
        found: list[int] = []
        for exponent in range(len(left).bit_length()):
            num_rounds, rank = divmod(num_before + 2**exponent - 1, len(left))
            found.append(max([*found[-1:], int(num_rounds * mean) + left[rank]]))
        return tuple(found)

    def num_left(self, num_blocks: int, num_prompt_tokens: int, max_tokens: int) -> int:
        """Tokens that a request with so many blocks is expected to draw yet. Counted by its blocks, so it only changes
        when it takes another one. 1 if nobody knows how long answers are."""
        num_drawn = num_blocks * self._block_size - num_prompt_tokens
        mean = 0.0 if self._mean_tokens is None else self._mean_tokens
        expected = min(max(mean, LONGER * num_drawn), max_tokens)
        return max(int(expected) - num_drawn + self._block_size // 2, 1)

    def _num_left(self, request: Request) -> int:
        """Prefills and embeddings give their places up once the prompt is computed."""
        if request.mode is RequestMode.PREFILL or request.embed is not None:
            return 1
        return self.num_left(len(request.block_ids), request.num_prompt_tokens, request.sampling_params.max_tokens)
