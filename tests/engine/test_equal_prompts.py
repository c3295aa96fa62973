"""Answers to one prompt at the same time: its KV is computed once, and lies in memory once."""

from __future__ import annotations

import pytest

from engine import messages as m
from engine.core import EngineCore
from engine.scheduling.schedule import SchedulerOutput
from tests.engine.test_shared_fetches import make_slow_pair
from tests.support.fake_device import BLOCK_SIZE, FakeDevice, add, assert_idle, make_core, reference, run, tokens_of

PROMPT_BLOCKS = 21
PROMPT = list(range((PROMPT_BLOCKS - 1) * BLOCK_SIZE + 2))  # a tail of two tokens


def used(core: EngineCore) -> int:
    return core.blocks.num_blocks - core.blocks.num_available_blocks


def run_and_count(core: EngineCore) -> tuple[dict[str, list[int]], int]:
    """(answers, the most blocks that were owned at a time)."""
    events: list[m.Event] = []
    most = 0
    while core.has_work:
        output = core.prepare()
        most = max(most, used(core))
        core.end(core.begin(output))
        assert core.scheduler.check_integrity() == []
        events += core.take_events()
    return tokens_of(events), most


@pytest.mark.parametrize("chunk_size", [8, 200])
def test_eight_answers_have_the_prompt_s_blocks_once(chunk_size: int) -> None:
    core, runner = make_core(chunk_size=chunk_size, num_blocks=256)
    for number in range(8):
        add(core, str(number), PROMPT, max_tokens=2)
    answers, most = run_and_count(core)
    assert answers == {str(number): reference(PROMPT, 2) for number in range(8)}
    assert most <= PROMPT_BLOCKS + 7  # each has a block of its own for the tail and its answer
    assert sum(runner.num_tokens_per_step) == 82 + 7 * 2 + 8 * 1
    assert_idle(core)


def test_prompts_with_an_equal_beginning_wait_for_no_more_than_that() -> None:
    core, _ = make_core(chunk_size=8, num_blocks=64)
    other = [*PROMPT[:16], *range(90, 50, -1)]
    add(core, "a", PROMPT)
    add(core, "b", other)
    scheduled = []
    for _ in range(4):
        output = core.prepare()
        scheduled.append({request.request_id: num for request, num in output.num_tokens.items()})
        core.end(core.begin(output))
    # The second is admitted as soon as the first has done their common four blocks.
    assert scheduled == [{"a": 8}, {"a": 8}, {"a": 8, "b": 8}, {"a": 8, "b": 8}]
    run(core)
    assert_idle(core)


@pytest.mark.parametrize("end", ["released", "failed", "preempted"])
def test_when_the_first_ends_the_next_one_computes(end: str) -> None:
    core, runner = make_core(chunk_size=8, num_blocks=256)
    for name in "abc":
        add(core, name, PROMPT)
    core.step()
    assert used(core) == PROMPT_BLOCKS  # those of "a" alone
    assert (core.load.num_requests_running, core.load.num_requests_waiting) == (3, 0)  # to routers they all run
    if end == "released":
        core.handle(m.Release("a"))
    elif end == "failed":
        runner.fail_next = True
    else:
        (first,) = core.scheduler._running
        core.scheduler._preempt(first, SchedulerOutput())
    answers, most = run_and_count(core)
    names = "abc" if end == "preempted" else "bc"
    assert {name: answers[name] for name in names} == {name: reference(PROMPT, 8) for name in names}
    assert most <= PROMPT_BLOCKS - 1 + 3 * 3
    assert_idle(core)


def test_others_go_past_those_that_are_held_back_and_take_no_place_of_theirs() -> None:
    core, _ = make_core(chunk_size=8, max_num_seqs=3)
    for name in ("a", "held"):
        add(core, name, PROMPT)
    for name in ("b", "c"):
        add(core, name, [{"b": 90, "c": 91}[name]] * 30)
    output = core.prepare()
    assert [request.request_id for request in output.num_tokens] == ["a", "b"]  # the third place is for "held"
    core.end(core.begin(output))
    events = run(core)
    assert tokens_of(events)["held"] == reference(PROMPT, 8)
    assert_idle(core)


def test_no_one_waits_without_a_prefix_cache() -> None:
    core, _ = make_core(enable_prefix_caching=False, num_blocks=64)
    for name in "ab":
        add(core, name, PROMPT)
    assert len(core.prepare().num_tokens) == 2


@pytest.mark.parametrize("is_cached", [True, False])
def test_without_a_prefix_cache_each_answer_costs_its_prompt_as_the_log_says(
    caplog: pytest.LogCaptureFixture, is_cached: bool
) -> None:
    core, runner = make_core(enable_prefix_caching=is_cached, num_blocks=128)
    for name in "abc":
        add(core, name, PROMPT, max_tokens=2)
    answers, most = run_and_count(core)
    assert answers == {name: reference(PROMPT, 2) for name in "abc"}
    num_prompt_tokens = sum(runner.num_tokens_per_step) - 3  # each second token takes the first one's KV
    if is_cached:
        assert (num_prompt_tokens, most) == (len(PROMPT) + 2 * 2, PROMPT_BLOCKS + 2)
        assert "prefix cache" not in caplog.text
    else:
        assert (num_prompt_tokens, most) == (3 * len(PROMPT), 3 * PROMPT_BLOCKS)
        assert "without the prefix cache each of n answers computes its whole prompt" in caplog.text
    assert_idle(core)


def test_across_two_workers_too() -> None:
    pair, slow = make_slow_pair(decode_blocks=256)
    names = [str(number) for number in range(8)]
    for name in names:
        pair.add(name, PROMPT, 2)
    most = 0
    for _ in range(500):
        if not pair.round() and not slow.waiting:
            break
        slow.deliver(1)
        most = max(most, used(pair.decode))
    assert pair.answers == {name: reference(PROMPT, 2) for name in names}
    assert most <= PROMPT_BLOCKS + 7
    assert list(pair.first_blocks) == ["0"]  # one prefill,
    assert slow.num_fetched == PROMPT_BLOCKS  # and each of its blocks came once
    assert isinstance(pair.prefill._device, FakeDevice)
    assert sum(pair.prefill._device.num_tokens_per_step) == len(PROMPT)
    assert pair.received == set(names)
    pair.assert_idle()
