"""Two engines, prefill and decode, with the messages that the services carry passed by hand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from common import metrics
from common.sampling import SamplingParams
from engine import messages as m
from engine.core import EngineCore
from kv_store.base import BlockRef, LocalBlock
from tests.examples import examples
from tests.support.fake_device import BLOCK_SIZE, add, assert_idle, make_core, reference, run, tokens_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


@dataclass
class Pair:
    """A prefill engine, a decode engine, and the wire between them; faults are injected by the test."""

    prefill: EngineCore
    decode: EngineCore
    answers: dict[str, list[int]] = field(default_factory=dict)
    fallbacks: dict[str, str] = field(default_factory=dict)
    first_blocks: dict[str, int] = field(default_factory=dict)
    prompts: dict[str, list[int]] = field(default_factory=dict)
    received: set[str] = field(default_factory=set)
    num_fetches: Counter[str] = field(default_factory=Counter)  # reports of arrived blocks
    lose_publications: bool = False
    swap_announced: bool = False  # the first two blocks of an announcement change places
    is_prefill_dead: bool = False

    def add(self, request_id: str, prompt: list[int], max_tokens: int = 8, **fields: object) -> None:
        self.prompts[request_id] = prompt
        add(self.decode, request_id, prompt, max_tokens, mode=m.RequestMode.REMOTE, **fields)

    def run(self, max_rounds: int = 3000) -> None:
        """Steps both engines in turn until neither has anything to do."""
        for _ in range(max_rounds):
            if not self.round():
                return
        raise AssertionError(f"not done after {max_rounds} rounds")

    def round(self) -> bool:
        worked = self.decode.step()
        worked |= self.from_decode()
        if not self.is_prefill_dead:
            worked |= self.prefill.step()
            worked |= self.from_prefill()
        for core in (self.prefill, self.decode):
            assert core.scheduler.check_integrity() == []
        return worked

    def kill_prefill(self) -> None:
        """As the services see it: every stream ends, and the decode engine is told."""
        self.is_prefill_dead = True
        for request_id in self.prompts:
            self.decode.handle(m.RemotePrefillFailed(request_id, "prefill worker died"))

    def from_decode(self) -> bool:
        events = self.decode.take_events()
        for event in events:
            match event:
                case m.RemotePrefillNeeded(request_id, first_block, stop_block):
                    self.first_blocks[request_id] = first_block
                    num_asked = stop_block * BLOCK_SIZE or len(self.prompts[request_id])
                    if self.is_prefill_dead:
                        self.decode.handle(m.RemotePrefillFailed(request_id, "prefill worker is not there"))
                        continue
                    self.decode.handle(m.AddPeer(self.prefill.ready().peer))
                    add(
                        self.prefill,
                        request_id,
                        self.prompts[request_id][:num_asked],
                        params=GREEDY,
                        mode=m.RequestMode.PREFILL,
                        is_part=stop_block > 0,
                        first_block=first_block,
                    )
                case m.BlocksFetched(request_id):
                    self.num_fetches[request_id] += 1
                case m.PrefillReceived(request_id):
                    self.received.add(request_id)
                    self.prefill.handle(m.Release(request_id))
                case m.TokensGenerated(request_id=request_id, tokens=tokens):
                    self.answers.setdefault(request_id, []).extend(token.token_id for token in tokens)
                    self.fallbacks[request_id] = event.fallback_reason
        return bool(events)

    def from_prefill(self) -> bool:
        events = self.prefill.take_events()
        for event in events:
            match event:
                case m.BlocksPublished(request_id, refs, failed, failure):
                    if self.lose_publications:
                        refs, failed, failure = [], [*failed, *(ref.index for ref in refs)], "disk full"
                    if self.swap_announced and len(refs) > 1:
                        first, second, *rest = refs
                        index = first.index
                        refs = [replace(first, index=second.index), replace(second, index=index), *rest]
                    self.decode.handle(m.RemoteBlocksPublished(request_id, refs, failed, failure))
                case m.TokensGenerated(request_id=request_id, tokens=[token]):
                    self.answers.setdefault(request_id, []).append(token.token_id)
                    self.decode.handle(m.RemoteFirstToken(request_id, token))
        return bool(events)

    def assert_idle(self) -> None:
        assert_idle(self.decode)
        if not self.is_prefill_dead:
            assert_idle(self.prefill)


def make_pair(*, decode_blocks: int = 64, prefill_blocks: int = 64, **settings: object) -> Pair:
    prefill, _ = make_core(num_blocks=prefill_blocks, epoch="prefill", **settings)
    decode, _ = make_core(num_blocks=decode_blocks, epoch="decode", **settings)
    return Pair(prefill, decode)


@pytest.mark.parametrize("num_prompt_tokens", [1, 3, 4, 5, 16, 23])
@pytest.mark.parametrize("chunk_size", [3, 4, 64])
def test_two_engines_give_the_reference_answer(num_prompt_tokens: int, chunk_size: int) -> None:
    pair = make_pair(chunk_size=chunk_size)
    prompt = list(range(num_prompt_tokens))
    pair.add("a", prompt)
    pair.run()
    assert pair.answers["a"] == reference(prompt, 8)
    assert pair.fallbacks["a"] == ""
    pair.assert_idle()


def test_decode_computes_nothing_of_the_prompt() -> None:
    pair = make_pair()
    pair.add("a", list(range(21)))
    pair.run()
    assert pair.decode._device.num_tokens_per_step == [1] * 7  # type: ignore[attr-defined] # FakeDevice's record


def test_announcing_at_the_end_gives_the_same_answer_in_one_fetch() -> None:
    pair = make_pair(chunk_size=4, announce="end")
    prompt = list(range(21))
    pair.add("a", prompt)
    pair.run()
    assert pair.answers["a"] == reference(prompt, 8)
    assert pair.num_fetches["a"] == 1
    pair.assert_idle()


def test_transfers_say_how_long_they_took() -> None:
    core, _ = make_core()  # its clock ticks with each look
    add(core, "p", list(range(9)), mode=m.RequestMode.PREFILL)
    published = [event for event in run(core) if isinstance(event, m.BlocksPublished)]
    assert [event.elapsed_s for event in published] == [1.0]


def test_the_answer_of_one_token_ends_at_once() -> None:
    pair = make_pair()
    pair.add("a", list(range(9)), max_tokens=1)
    pair.run()
    pair.prefill.handle(m.Release("a"))  # the stream ends with the request
    assert pair.answers["a"] == reference(list(range(9)), 1)
    pair.run()
    pair.assert_idle()


def test_only_missing_blocks_are_asked_for() -> None:
    pair = make_pair()
    prompt = list(range(40))
    pair.add("a", prompt[:20])
    pair.run()
    pair.add("b", prompt)
    pair.run()
    assert pair.answers["b"] == reference(prompt, 8)
    assert pair.first_blocks == {"a": 0, "b": 5}


def test_a_fully_cached_prompt_needs_no_prefill_worker() -> None:
    pair = make_pair()
    prompt = list(range(18))
    pair.add("a", prompt)
    pair.run()
    pair.is_prefill_dead = True
    pair.add("b", prompt)
    pair.run()
    assert pair.answers["b"] == reference(prompt, 8)
    assert "b" not in pair.first_blocks
    assert "b" in pair.received


@pytest.mark.parametrize(
    ("num_tokens", "num_cached", "min_remote_tokens", "asked_from"),
    [
        (BLOCK_SIZE - 1, 0, 0, None),  # less than a block
        (BLOCK_SIZE, 0, 0, 0),
        (5 * BLOCK_SIZE, 4 * BLOCK_SIZE, 0, 4),  # one whole block, the last
        (5 * BLOCK_SIZE + 3, 5 * BLOCK_SIZE, 0, None),
        (5 * BLOCK_SIZE + 3, 4 * BLOCK_SIZE, 0, 4),
        (20, 0, 21, None),
        (20, 0, 20, 0),
        (20, 8, 13, None),
        (3, 0, 1, 0),
        (11, 8, 1, 2),
    ],
)
def test_few_missing_tokens_are_computed_in_place(
    num_tokens: int, num_cached: int, min_remote_tokens: int, asked_from: int | None
) -> None:
    """Tokens in the cache here, and a worker to ask for the others if they are many enough."""
    pair = make_pair()
    prompt = list(range(num_tokens))
    if num_cached:
        add(pair.decode, "fills the cache", prompt[:num_cached], max_tokens=1)
        run(pair.decode)
    pair.add("a", prompt, min_remote_tokens=min_remote_tokens)
    pair.run()
    assert pair.answers["a"] == reference(prompt, 8)
    assert pair.first_blocks.get("a") == asked_from
    assert pair.received == {"a"}
    assert pair.fallbacks["a"] == ""
    pair.assert_idle()


def num_fallbacks() -> float:
    return metrics.worker_fallbacks._value.get()


def test_lost_publications_are_computed_in_place() -> None:
    pair = make_pair(chunk_size=4)
    pair.lose_publications = True
    prompt = list(range(23))
    before = num_fallbacks()
    pair.add("a", prompt)
    pair.run()
    assert pair.answers["a"] == reference(prompt, 8)
    assert pair.fallbacks["a"] == "disk full"
    assert num_fallbacks() == before + 1
    pair.assert_idle()


def test_blocks_announced_under_another_ones_name_are_computed_in_place() -> None:
    pair = make_pair()
    pair.swap_announced = True
    prompt = list(range(23))
    pair.add("a", prompt)
    pair.run()
    assert pair.answers["a"] == reference(prompt, 8)
    assert pair.fallbacks["a"] == "a block of another prompt was published for it"
    pair.assert_idle()


def test_blocks_announced_twice_or_never_asked_for_are_fetched_once_or_not_at_all() -> None:
    pair = make_pair()
    prompt = list(range(23))
    pair.add("a", prompt)
    pair.decode.step()
    pair.decode.take_events()
    request = pair.decode.scheduler.requests["a"]
    names = [pair.decode.blocks.cache.name_in_prompt(request, index) for index in range(6)]
    refs = [BlockRef(index=index, block_hash=names[index], peer="nobody") for index in (0, 0, 5, 5)]
    refs += [BlockRef(index=index, block_hash=names[0], peer="nobody") for index in (6, 2**32 - 1, 2**63, -1)]
    pair.decode.handle(m.RemoteBlocksPublished("a", refs, [6, 2**64, -1], "odd"))
    pair.decode.take_in_transfers()
    (fetched,) = [event for event in pair.decode.take_events() if isinstance(event, m.BlocksFetched)]
    assert sorted(fetched.failed_indexes) == [0, 5]
    pair.decode.handle(m.RemotePrefillFailed("a", "it lies"))
    while pair.decode.step():
        pass
    assert tokens_of(pair.decode.take_events())["a"] == reference(prompt, 8)
    pair.assert_idle()


def test_a_resumed_request_takes_its_prompt_over_and_continues() -> None:
    pair = make_pair()
    prompt, answer = list(range(23)), reference(list(range(23)), 8)
    pair.add("a", prompt, output_token_ids=answer[:3])
    pair.run()
    sampled_again, *rest = pair.answers["a"]  # the service does not relay what the client has
    assert sampled_again == answer[0]
    assert rest == answer[3:]
    pair.assert_idle()


def test_a_lease_holds_blocks_until_it_ends() -> None:
    core, _ = make_core(num_blocks=16)
    add(core, "a", list(range(10)), mode=m.RequestMode.PREFILL)
    while core.step():
        core.take_events()
    assert core.load.num_leases == 1
    assert core.load.num_free_blocks == 13
    core.handle(m.Release("a"))
    assert core.load.num_leases == 0
    assert_idle(core)
    assert core.load.num_cached_blocks == 2


def test_a_prefill_publishes_from_the_first_block_that_is_needed() -> None:
    core, _ = make_core(chunk_size=BLOCK_SIZE)
    add(core, "a", list(range(18)), mode=m.RequestMode.PREFILL, first_block=2)
    events = []
    for _ in range(12):
        core.step()
        events += core.take_events()
    published = [ref.index for event in events if isinstance(event, m.BlocksPublished) for ref in event.blocks]
    assert published == [2, 3, 4]


@pytest.mark.parametrize(("num_tokens", "marks"), [(18, [False] * 4 + [True]), (16, [False] * 4)])
def test_a_prefill_marks_the_tail_that_is_not_full(num_tokens: int, marks: list[bool]) -> None:
    core, _ = make_core(chunk_size=2 * BLOCK_SIZE)
    published: list[bool] = []
    publish = core._connector.publish

    def recorded(job_id: int, blocks: Sequence[LocalBlock]) -> None:
        published.extend(block.is_partial for block in blocks)
        publish(job_id, blocks)

    core._connector.publish = recorded  # type: ignore[method-assign]
    add(core, "a", list(range(num_tokens)), mode=m.RequestMode.PREFILL)
    while core.step():
        core.take_events()
    assert published == marks


@settings(max_examples=examples(60), deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 9)), min_size=1, max_size=6
    ),
    chunk_size=st.integers(1, 16),
    decode_blocks=st.integers(12, 40),
    kill_after=st.one_of(st.none(), st.integers(0, 25)),
)
def test_any_mixture_gives_the_reference_answers_whenever_prefill_dies(
    requests: list[tuple[list[int], int]], chunk_size: int, decode_blocks: int, kill_after: int | None
) -> None:
    pair = make_pair(chunk_size=chunk_size, decode_blocks=decode_blocks, prefill_blocks=20, max_num_seqs=4)
    for number, (prompt, max_tokens) in enumerate(requests):
        pair.add(str(number), prompt, max_tokens)
    if kill_after is not None:
        for _ in range(kill_after):
            pair.round()
        pair.kill_prefill()
    for _ in requests:  # leases may hold all blocks of the prefill worker until they end
        pair.run()
        for request_id in pair.answers:
            pair.prefill.handle(m.Release(request_id))
    for number, (prompt, max_tokens) in enumerate(requests):
        assert pair.answers[str(number)] == reference(prompt, max_tokens)
    if kill_after is None:
        pair.run()
        pair.assert_idle()
    assert_idle(pair.decode)


@pytest.mark.parametrize("is_failure", [True, False])
def test_announced_blocks_outlive_a_prefill_that_ends_early(is_failure: bool) -> None:
    """Whether a step fails or nobody waits any more: a decode worker may be reading them until the lease is over."""
    core, runner = make_core(num_blocks=8, chunk_size=BLOCK_SIZE)
    add(core, "a", list(range(22)), mode=m.RequestMode.PREFILL)
    for _ in range(3):
        core.step()
    events = core.take_events()
    announced = [ref for event in events if isinstance(event, m.BlocksPublished) for ref in event.blocks]
    block_ids = list(core.scheduler.requests["a"].block_ids[: len(announced)])
    before = runner.kv_cache[block_ids].clone()
    assert [ref.index for ref in announced] == [0, 1, 2]
    if is_failure:
        runner.fail_next = True
        core.step()
        assert [event.request_id for event in core.take_events() if isinstance(event, m.RequestFailed)] == ["a"]
    else:
        core.handle(m.StopPrefill("a"))
    num_steps = len(runner.num_tokens_per_step)
    add(core, "b", list(range(50, 72)))  # needs more blocks than there are beside
    run(core)
    assert len(runner.num_tokens_per_step) == num_steps
    assert core.load.num_leases == 1
    assert runner.kv_cache[block_ids].equal(before)
    core.handle(m.Release("a"))
    events = run(core)
    assert tokens_of(events)["b"] == reference(list(range(50, 72)), 8)
    assert_idle(core)


def test_a_prefill_that_ends_before_it_announced_anything_leaves_nothing_behind() -> None:
    core, runner = make_core(chunk_size=BLOCK_SIZE)
    add(core, "failed", list(range(22)), mode=m.RequestMode.PREFILL)
    runner.fail_next = True
    core.step()
    add(core, "waiting", list(range(22)), mode=m.RequestMode.PREFILL)
    core.handle(m.StopPrefill("waiting"))
    core.handle(m.StopPrefill("unknown"))
    assert core.load.num_leases == 0
    assert_idle(core)


def test_a_prefill_worker_hears_of_a_prompt_before_the_step_under_way_is_done() -> None:
    core, _ = make_core()
    add(core, "a", [1, 2, 3, 4, 5], 9)
    core.step()
    heard: list[m.Event] = []

    def between_layers() -> None:
        add(core, "b", list(range(22)), mode=m.RequestMode.REMOTE)
        core.begin_remote()
        heard.extend(core.take_events())

    core.take_events()
    core.end(core.begin(core.prepare()), between_layers)
    assert heard == [m.RemotePrefillNeeded("b", 0)]
    assert core.load.num_requests_running == 2
    core.handle(m.RemotePrefillFailed("b", "no"))
    answers = tokens_of(run(core))
    assert answers["b"] == reference(list(range(22)), 8)
    assert_idle(core)


def test_what_needs_no_prefill_worker_waits_for_the_next_step() -> None:
    core, runner = make_core()
    add(core, "a", [1, 2, 3, 4, 5], 9)
    core.step()

    def between_layers() -> None:
        if "short" not in core.scheduler.requests:
            add(core, "local", list(range(22)))
            add(core, "short", [7, 8], mode=m.RequestMode.REMOTE)
            core.begin_remote()

    core.end(core.begin(core.prepare()), between_layers)
    assert runner.num_tokens_per_step[-1] == 1
    answers = tokens_of(run(core))
    assert answers["local"] == reference(list(range(22)), 8)
    assert answers["short"] == reference([7, 8], 8)
    assert_idle(core)


def test_a_newcomer_for_which_host_memory_would_be_written_waits_for_the_next_step() -> None:
    core, _ = make_core(num_blocks=12, host_cache_gb=1e-6)
    add(core, "old", list(range(40)), 1)
    run(core)
    add(core, "a", [90, 91], 9)
    core.step()

    def between_layers() -> None:
        add(core, "b", list(range(50, 62)), mode=m.RequestMode.REMOTE)
        core.begin_remote()
        assert not core.scheduler.requests["b"].block_ids

    core.take_events()
    core.end(core.begin(core.prepare()), between_layers)
    core.prepare()
    assert m.RemotePrefillNeeded("b", 0) in core.take_events()


mid_step_requests = st.lists(
    st.tuples(
        st.lists(st.integers(1, 3), min_size=1, max_size=20), st.integers(1, 8), st.integers(0, 40), st.booleans()
    ),
    min_size=2,
    max_size=7,
)


BEGUN_IN_MID_STEP = given(
    requests=mid_step_requests, released=st.sets(st.integers(0, 6), max_size=3), after_calls=st.integers(0, 40)
)


def begun_in_mid_step(requests: list[tuple[list[int], int, int, bool]], released: set[int], after_calls: int) -> None:
    """Prompts of three tokens share prefixes; the cache is small, and blocks arrive while others are computed."""
    pair = Pair(make_core(epoch="p", chunk_size=5)[0], make_core(epoch="d", num_blocks=8, chunk_size=5)[0])
    call = -1

    def pass_messages() -> None:
        nonlocal call
        call += 1
        for number, (prompt, max_tokens, when, is_remote) in enumerate(requests):
            if when == call and is_remote:
                pair.add(str(number), prompt, max_tokens)
            elif when == call:
                add(pair.decode, str(number), prompt, max_tokens)
            if call == after_calls and number in released:
                pair.decode.handle(m.Release(str(number)))
                pair.prefill.handle(m.Release(str(number)))
        pair.decode.take_in_transfers()
        pair.decode.begin_remote()
        pair.from_decode()
        pair.prefill.step()
        pair.from_prefill()
        assert pair.decode.scheduler.check_integrity() == []

    for _ in range(400):
        pair.decode.end(pair.decode.begin(pair.decode.prepare()), pass_messages)
        pass_messages()
        if call > 40 and not pair.decode.scheduler.requests and not pair.prefill.scheduler.requests:
            break
    for number, (prompt, max_tokens, when, _) in enumerate(requests):
        if number in released and when <= after_calls:
            continue
        assert pair.answers[str(number)] == reference(prompt, max_tokens)
    assert_idle(pair.decode)


test_requests_that_begin_in_mid_step_get_the_reference_answers = settings(max_examples=15, deadline=None)(
    BEGUN_IN_MID_STEP(begun_in_mid_step)
)
test_requests_that_begin_in_mid_step_get_the_reference_answers_many_times = pytest.mark.slow(
    settings(max_examples=150, deadline=None)(BEGUN_IN_MID_STEP(begun_in_mid_step))
)


def test_a_prefill_stopped_in_mid_step_or_when_it_is_done_stays_leased() -> None:
    core, _ = make_core(chunk_size=BLOCK_SIZE)
    add(core, "a", list(range(22)), mode=m.RequestMode.PREFILL)
    core.step()
    output = core.prepare()
    core.end(core.begin(output), lambda: core.handle(m.StopPrefill("a")))
    add(core, "b", list(range(9)), mode=m.RequestMode.PREFILL)
    run(core)
    core.handle(m.StopPrefill("b"))
    run(core)
    assert core.load.num_leases == 2
    for name in ("a", "b"):
        core.handle(m.Release(name))
    assert_idle(core)
