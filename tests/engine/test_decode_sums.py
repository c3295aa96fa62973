"""The scheduler's running sums are those of a walk over its requests, whatever becomes of them."""

from __future__ import annotations

import random

import pytest

from common.batch_time import StepShape
from common.sampling import SamplingParams
from engine import messages as m
from engine.core import EngineCore
from engine.request import RequestStatus
from engine.step import StepInput, StepRow, shape_of
from tests.support.fake_device import VOCAB_SIZE, add, assert_idle, make_core, run

PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, logprobs=2),
    SamplingParams(seed=1),
    SamplingParams(seed=1, top_k=3),
    SamplingParams(seed=1, min_p=0.1, presence_penalty=0.5),
)


def walked(core: EngineCore) -> StepShape:
    """Decodes of the next step, looked for one by one."""
    rows = []
    for request in core.scheduler.requests.values():
        if request.status is RequestStatus.RUNNING and request.num_missing_tokens == 1:
            row = core._forward._row(request, 1, {})
            rows.append(
                StepRow(token_ids=[1], num_computed_tokens=row.num_computed_tokens, block_ids=[], draw=row.draw)
            )
    return shape_of(rows)


@pytest.mark.parametrize("preemption_mode", ["recompute", "swap"])
@pytest.mark.parametrize("speculation", ["none", "ngram"])
@pytest.mark.parametrize("num_blocks", [24, 400])
def test_sums_are_those_of_a_walk(num_blocks: int, speculation: str, preemption_mode: str) -> None:
    rng = random.Random(num_blocks)
    core, _ = make_core(
        num_blocks=num_blocks,
        max_num_seqs=8,
        max_num_batched_tokens=48,
        chunk_size=16,
        speculation=speculation,
        preemption_mode=preemption_mode,
        swap_space_gb=2e-6,
    )
    seen = set()
    for number in range(80):
        if rng.random() < 0.3:
            prompt = [rng.randrange(VOCAB_SIZE - 1) for _ in range(rng.choice((1, 3, 12, 40)))]
            params = rng.choice(PARAMS)
            add(core, str(number), prompt, params=params)
        if rng.random() < 0.1 and core.scheduler.requests:
            core.handle(m.Release(rng.choice(list(core.scheduler.requests))))
        assert core.scheduler.decode_shape == walked(core)
        core.step()
        core.take_events()
        shape = core.scheduler.decode_shape
        assert shape == walked(core)
        seen |= {name for name in shape.__struct_fields__ if getattr(shape, name)}
    assert {"num_decodes", "longest_context", "num_drawn", "num_filtered", "num_edited", "num_logprobs"} <= seen
    run(core)
    assert core.scheduler.decode_shape == StepShape()
    assert_idle(core)


def test_a_step_has_the_shape_that_was_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no prompt is waiting, what the device gets is what the sums said."""
    core, device = make_core(max_num_seqs=8)
    begin, shapes = device.begin, []

    def noted(step: StepInput) -> object:
        shapes.append((core.scheduler.decode_shape, step.shape))
        return begin(step)

    monkeypatch.setattr(device, "begin", noted)
    for number in range(4):
        add(core, str(number), list(range(5 + number)), params=PARAMS[number])
    run(core)
    decodes = [(said, is_) for said, is_ in shapes if not is_.num_chunks]
    assert len(decodes) > 5
    for said, is_ in decodes:
        assert said == is_
