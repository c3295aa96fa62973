"""A prompt in two parts: the prefill engine computes whole blocks of its beginning, the decode engine the rest and the
first token."""

from __future__ import annotations

from typing import Any

import pytest

from engine import messages as m
from engine.request import Request
from engine.scheduling.room import Room
from engine.scheduling.waiting_queue import WaitingQueue
from tests.engine.test_remote_kv import GREEDY, Pair, make_pair
from tests.support.fake_device import BLOCK_SIZE, add, assert_idle, make_core, reference, run

PROMPT = list(range(23))  # five blocks, and three tokens


def computed(pair: Pair) -> tuple[int, int]:
    """Tokens that (prefill, decode) have computed, but for those of the answer after the first."""
    devices = pair.prefill._device, pair.decode._device
    of_prefill, of_decode = (sum(one.num_tokens_per_step) for one in devices)  # type: ignore[attr-defined]
    return of_prefill, of_decode - 7 * len(pair.answers)


@pytest.mark.parametrize("split_at", [4, 8, 11, 20])
@pytest.mark.parametrize("chunk_size", [3, 4, 64])
def test_each_engine_computes_its_part(split_at: int, chunk_size: int) -> None:
    pair = make_pair(chunk_size=chunk_size)
    pair.add("a", PROMPT, split_at=split_at)
    pair.run()
    assert pair.answers["a"] == reference(PROMPT, 8)
    assert pair.fallbacks["a"] == ""
    remote = split_at // BLOCK_SIZE * BLOCK_SIZE
    assert computed(pair) == (remote, len(PROMPT) - remote)
    pair.assert_idle()


@pytest.mark.parametrize(
    ("split_at", "min_remote", "expected"),
    [
        (3, 0, (0, 23)),  # no whole block
        (23, 0, (23, 0)),  # the whole prompt
        (100, 0, (23, 0)),
        (8, 9, (0, 23)),  # a part that is not worth asking for
    ],
)
def test_what_is_no_split(split_at: int, min_remote: int, expected: tuple[int, int]) -> None:
    pair = make_pair()
    pair.add("a", PROMPT, split_at=split_at, min_remote_tokens=min_remote)
    pair.run()
    assert pair.answers["a"] == reference(PROMPT, 8)
    assert computed(pair) == expected


def test_what_the_decode_engine_has_is_not_asked_for() -> None:
    pair = make_pair()
    pair.add("a", PROMPT[:10])
    pair.run()
    pair.add("b", PROMPT, split_at=16)
    pair.run()
    assert pair.answers["b"] == reference(PROMPT, 8)
    assert pair.first_blocks["b"] == 2
    pair.add("c", PROMPT, split_at=16)
    pair.run()
    assert "c" not in pair.first_blocks, "all of it is here"


def test_cached_parts_wait_for_no_turn() -> None:
    """The prefill engine has the beginning, and a long queue: it hands it over at once, and computes nothing."""
    pair = make_pair(prefill_blocks=128, chunk_size=4, max_num_batched_tokens=4)
    pair.add("a", PROMPT[:16])
    pair.run()
    for core in (pair.decode, pair.prefill):
        core.take_events()
    add(pair.prefill, "busy", [50 + one % 40 for one in range(150)], params=GREEDY, mode=m.RequestMode.PREFILL)
    pair.decode.handle(m.HintCache(call_id=1, action=m.CacheAction.FLUSH, block_hashes=[]))
    pair.add("b", PROMPT, split_at=16)
    for _ in range(14):  # far fewer steps than the queue takes
        pair.round()
    assert pair.answers["b"] == reference(PROMPT, 8)
    busy = pair.prefill.scheduler.requests["busy"]
    assert busy.num_missing_tokens > 0
    pair.run()
    pair.prefill.handle(m.Release("busy"))
    pair.run()
    pair.assert_idle()


def test_cached_parts_are_handed_over_in_mid_step() -> None:
    core, _ = make_core(chunk_size=4)
    add(core, "a", PROMPT[:16], params=GREEDY)
    run(core)
    add(core, "busy", PROMPT[::-1], params=GREEDY)
    begun = core.begin(core.prepare())
    core.take_events()
    add(core, "part", PROMPT[:16], params=GREEDY, mode=m.RequestMode.PREFILL, is_part=True)

    def meanwhile() -> None:
        core.begin_remote()
        core.take_in_transfers()

    core.begin_remote()
    core.take_in_transfers()
    done, published = core.take_events()
    assert isinstance(done, m.TokensGenerated)
    assert (done.request_id, done.tokens, done.num_cached_tokens) == ("part", [], 16)
    assert isinstance(published, m.BlocksPublished)
    assert [one.index for one in published.blocks] == [0, 1, 2, 3]
    core.end(begun, meanwhile)
    core.handle(m.Release("part"))
    run(core)
    assert_idle(core)


def test_no_part_is_looked_for_in_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes as long as the queue is, for each part, in each step."""
    core, _ = make_core(max_num_seqs=1, chunk_size=4)
    add(core, "busy", PROMPT[::-1], params=GREEDY)
    core.step()
    for number in range(3):
        prompt = PROMPT[number : number + 16]
        add(core, str(number), prompt, params=GREEDY, mode=m.RequestMode.PREFILL, is_part=True)
    looked_for: list[str] = []

    def contains(queue: WaitingQueue, request: Request) -> bool:
        looked_for.append(request.request_id)
        return any(one is request for one in queue)

    monkeypatch.setattr(WaitingQueue, "__contains__", contains)
    core.step()
    assert core.scheduler.num_waiting == 3
    assert not looked_for
    core.handle(m.Release("1"))
    run(core)
    for name in ("0", "2"):
        core.handle(m.Release(name))
    run(core)
    assert_idle(core)


@pytest.mark.parametrize("rounds", range(1, 9))
def test_a_lost_prefill_engine_costs_only_time(rounds: int) -> None:
    pair = make_pair(chunk_size=4)
    pair.add("a", PROMPT, split_at=16)
    for _ in range(rounds):
        pair.round()
    pair.kill_prefill()
    pair.run()
    assert pair.answers["a"] == reference(PROMPT, 8)
    pair.assert_idle()


def test_blocks_that_are_not_published_are_computed_here() -> None:
    pair = make_pair(chunk_size=4)
    pair.lose_publications = True
    pair.add("a", PROMPT, split_at=16)
    pair.run()
    assert pair.answers["a"] == reference(PROMPT, 8)
    assert pair.fallbacks["a"] == "disk full"


def test_an_answer_goes_on_elsewhere() -> None:
    """The prompt is split on the worker that takes the answer over, too."""
    pair = make_pair()
    known = reference(PROMPT, 3)
    pair.add("a", PROMPT, split_at=12, output_token_ids=known)
    pair.run()
    assert pair.answers["a"] == reference(PROMPT, 8)[3:]


@pytest.mark.parametrize("when", range(1, 12))
def test_whoever_releases_leaves_nothing_behind(when: int) -> None:
    pair = make_pair(chunk_size=4)
    pair.add("a", PROMPT, split_at=16)
    for _ in range(when):
        pair.round()
    for core in (pair.decode, pair.prefill):
        core.handle(m.Release("a"))
    pair.run()
    pair.assert_idle()


def test_preempted_parts_are_computed_again() -> None:
    """Two parts grow in blocks for one and a half."""
    core, _ = make_core(num_blocks=12, chunk_size=4, max_num_batched_tokens=4)
    for name, first in (("a", 0), ("b", 40)):
        prompt = [*range(first, first + 28)]
        add(core, name, prompt, params=GREEDY, mode=m.RequestMode.PREFILL, is_part=True)
    done = []
    for _ in range(200):
        core.step()
        for event in core.take_events():
            if isinstance(event, m.TokensGenerated):
                done.append(event.request_id)
                core.handle(m.Release(event.request_id))
    assert sorted(done) == ["a", "b"]
    assert_idle(core)


def test_a_part_is_computed_from_where_the_cache_ends() -> None:
    core, device = make_core(chunk_size=64)
    add(core, "a", PROMPT[:8], params=GREEDY)
    run(core)
    before = sum(device.num_tokens_per_step)
    add(core, "b", PROMPT[:20], params=GREEDY, mode=m.RequestMode.PREFILL, is_part=True, first_block=1)
    run(core)
    assert sum(device.num_tokens_per_step) - before == 20 - 8
    core.handle(m.Release("b"))
    run(core)
    assert_idle(core)


# ------------------------------------------------------------------------------------------------- room


def test_a_full_worker_says_when_there_is_room() -> None:
    core, _ = make_core(max_num_seqs=2)
    assert core.load.room_after == ()
    add(core, "first", PROMPT[:4], max_tokens=20)
    run(core)
    for name in ("a", "b", "c"):
        add(core, name, PROMPT[:4], max_tokens=40)
    core.step()
    core.step()
    first, second = core.load.room_after  # behind c
    assert first < second
    assert 10 <= first <= 22, "as long as the first answer was, give or take a block"
    assert 30 <= second <= 42
    for name in ("a", "b", "c"):
        core.handle(m.Release(name))
    assert core.load.room_after == ()


def test_nobody_knows_how_long_answers_are_before_one_has_ended() -> None:
    room = Room(BLOCK_SIZE)
    assert room.after([], 3) == ()
    room.ended(10)
    assert room.after([], 3) == ()


@pytest.mark.parametrize(
    "fields",
    [
        {"mode": m.RequestMode.PREFILL},
        {"embed": m.Embed(request_id="a", prompt_token_ids=PROMPT, pooling=m.Pooling.LAST)},
    ],
)
def test_who_draws_no_answer_makes_room_at_once(fields: dict[str, Any]) -> None:
    room = Room(BLOCK_SIZE)
    room.ended(40)
    one = Request(
        request_id="a",
        token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        sampling_params=GREEDY,
        arrival_time=0.0,
        **fields,
    )
    assert room.after([one], 0) == (1,)
