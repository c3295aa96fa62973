"""What it costs to know how long steps take: a prediction, a chunk that fits, and learning from a step of 32 decodes.

`python -m bench.step_times MODEL.json`, with a model of time that `baton profile` wrote.
"""

from __future__ import annotations

import sys
import timeit
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from common.batch_time import BatchTime, StepShape
from common.batch_time_file import decode
from engine.learning.learner import Learner, Source
from engine.learning.observed_device import ObservedDevice
from engine.step import Draw, StepRow
from simulation.device import VirtualDevice

NUM_ROWS = 32
CONTEXT = 500


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
    device = VirtualDevice(time, num_blocks=2, block_size=16, max_model_len=CONTEXT + 1)
    device.info = replace(device.info, device="cpu")  # of a CPU alone it is asked whether a step had it to itself
    observed = ObservedDevice(device, Learner(time.key, time, Source.FILE, 0.0, beside=lambda _: None))
    added = median_us(lambda: observed.compute(rows)) - median_us(lambda: device.compute(rows))
    share = added / step_s / 1e6
    print(f"learning       {added:6.1f} us a step of {NUM_ROWS} decodes, {share:.2%} of its {1000 * step_s:.1f} ms")


if __name__ == "__main__":
    main()
