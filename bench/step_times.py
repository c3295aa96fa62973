"""What it costs to know how long steps take: a prediction, a chunk that fits, and learning from a step of 32 decodes.

`python -m bench.step_times MODEL.json`, with a model of time that `baton profile` wrote.
"""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable
from pathlib import Path

from common.batch_time import BatchTime, StepShape
from common.batch_time_file import decode
from engine.device import Device, KVPlane, Ticket, do_nothing
from engine.learning.learner import Learner, Source
from engine.learning.observed_device import ObservedDevice
from engine.step import Draw, StepInput, StepOutput, StepRow

NUM_ROWS = 32
CONTEXT = 500


class Still(Device):
    """Computes nothing, and says how long a step takes by the model."""

    def __init__(self, seconds: float) -> None:
        self.info = _Info()  # type: ignore[assignment] # all that is read of it
        self._output = StepOutput(tokens=[None] * NUM_ROWS, elapsed_s=seconds)

    def begin(self, step: StepInput) -> Ticket:
        return Ticket(step.number)

    def end(self, ticket: Ticket, meanwhile: Callable[[], None] = do_nothing) -> StepOutput:  # noqa: ARG002
        return self._output

    def copy(self, copies: object) -> None:
        """Nothing."""

    def planes(self) -> list[KVPlane]:
        return []


class _Info:
    device = "cpu"


def median_us(work: Callable[[], object], number: int = 500) -> float:
    times = sorted(timeit.repeat(work, number=number, repeat=15))
    return times[len(times) // 2] / number * 1e6


def main() -> None:
    time: BatchTime = decode(Path(sys.argv[1]).read_bytes())
    shape = StepShape(
        num_decodes=NUM_ROWS, decode_context=NUM_ROWS * CONTEXT, longest_context=CONTEXT, num_head_rows=NUM_ROWS
    )
    step_s = time.seconds(shape)
    print(f"predict        {median_us(lambda: time.predict(shape)):6.1f} us")
    print(f"tokens_within  {median_us(lambda: time.tokens_within(3 * step_s, shape, 100, 512)):6.1f} us")
    greedy = Draw(index=3, temperature=0.0)
    rows = [StepRow(token_ids=[1], num_computed_tokens=CONTEXT, block_ids=[1], draw=greedy) for _ in range(NUM_ROWS)]
    still = Still(step_s)
    observed = ObservedDevice(still, Learner(time.key, time, Source.FILE, 0.0, beside=lambda _: None))
    added = median_us(lambda: observed.compute(rows)) - median_us(lambda: still.compute(rows))
    share = added / step_s / 1e6
    print(f"learning       {added:6.1f} us a step of {NUM_ROWS} decodes, {share:.2%} of its {1000 * step_s:.1f} ms")


if __name__ == "__main__":
    main()
