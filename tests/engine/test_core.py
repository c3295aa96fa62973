"""The engine on a model that notices every wrong byte of KV."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.block_hash import block_hashes
from common.sampling import SamplingParams
from common.targets import LatencyTargets
from common.types import FinishReason, request_tag
from engine import messages as m
from kv_store.base import ConnectorConfig
from kv_store.memory import MemoryConnector
from tests.examples import examples
from tests.support.fake_device import BLOCK_SIZE, add, assert_idle, make_core, reference, run, tokens_of

prompts = st.lists(st.integers(0, 20), min_size=1, max_size=30)


def test_one_request_gives_the_reference_answer() -> None:
    core, _ = make_core()
    add(core, "a", [1, 2, 3, 4, 5], max_tokens=10)
    events = run(core)
    assert tokens_of(events)["a"] == reference([1, 2, 3, 4, 5], 10)
    assert_idle(core)


@pytest.mark.parametrize("chunk_size", [1, 3, 4, 7, 64])
def test_chunks_do_not_change_the_answer(chunk_size: int) -> None:
    core, runner = make_core(chunk_size=chunk_size)
    prompt = list(range(23))
    add(core, "a", prompt, max_tokens=4)
    assert tokens_of(run(core))["a"] == reference(prompt, 4)
    assert max(runner.num_tokens_per_step) <= chunk_size


def test_decodes_go_first_and_prompts_fill_what_is_left() -> None:
    core, runner = make_core(max_num_batched_tokens=6, chunk_size=6)
    add(core, "a", [1, 2], max_tokens=8)
    core.step()
    add(core, "b", list(range(12)), max_tokens=2)
    events = core.take_events() + run(core)
    assert runner.num_tokens_per_step[1:4] == [6, 6, 3]  # a's decode beside 5, 5 and 2 tokens of b's prompt
    assert tokens_of(events) == {"a": reference([1, 2], 8), "b": reference(list(range(12)), 2)}


def test_a_warm_prefix_is_not_computed_again() -> None:
    core, runner = make_core()
    prompt = list(range(18))
    add(core, "cold", prompt, max_tokens=3)
    run(core)
    runner.num_tokens_per_step.clear()
    add(core, "warm", prompt, max_tokens=3)
    events = run(core)
    assert tokens_of(events)["warm"] == reference(prompt, 3)
    assert runner.num_tokens_per_step[0] == 2  # 16 of 18 tokens were cached
    assert events[0].num_cached_tokens == 16
    assert_idle(core)


def test_findable_blocks_are_listed_and_told() -> None:
    core, _ = make_core(num_blocks=8)
    prompts = [list(range(start, start + 16)) for start in (0, 20)]
    known: set[bytes] = set()

    def hear() -> None:
        for event in core.take_block_news():
            assert isinstance(event, m.BlocksChanged)
            known.update(event.stored[at : at + 16] for at in range(0, len(event.stored), 16))
            known.difference_update(event.removed[at : at + 16] for at in range(0, len(event.removed), 16))

    for number, prompt in enumerate(prompts):
        add(core, str(number), prompt, max_tokens=8)
        run(core)
        names = block_hashes(core.blocks.cache._root_hash, prompt, BLOCK_SIZE)
        hear()
        assert set(names) <= known
        core.handle(m.GetBlocks())
        listed = core.take_events()[-1]
        assert isinstance(listed, m.BlocksListed)
        assert {listed.names[at : at + 16] for at in range(0, len(listed.names), 16)} == known
    assert not set(block_hashes(core.blocks.cache._root_hash, prompts[0], BLOCK_SIZE)) <= known, "some made room"
    assert core.take_block_news() == []


def test_other_salts_share_nothing() -> None:
    core, runner = make_core()
    prompt = list(range(18))
    add(core, "a", prompt, cache_salt="red")
    run(core)
    runner.num_tokens_per_step.clear()
    add(core, "b", prompt, cache_salt="blue")
    assert tokens_of(run(core))["b"] == reference(prompt, 8)
    assert runner.num_tokens_per_step[0] == 18


def order_of(events: list[m.Event]) -> list[str]:
    """Ids, in the order of their first tokens."""
    return list(tokens_of(events))


def test_by_priority_the_queue_is_not_in_the_order_of_arrival() -> None:
    """A step of priority is worth ten seconds; the clock here goes on by one for each look at it."""
    core, _ = make_core(max_num_seqs=1, queue_policy="priority")
    add(core, "runs", [1, 2, 3], max_tokens=4)
    core.step()
    for request_id, priority in (("later", 5), ("a", 0), ("b", 0), ("soon", -5)):
        add(core, request_id, [4, 5, 6], max_tokens=2, priority=priority)
    assert order_of(core.take_events() + run(core)) == ["runs", "soon", "a", "b", "later"]
    assert_idle(core)


def test_a_request_knows_its_targets_and_its_age() -> None:
    core, _ = make_core()  # whose clock goes on by a second whenever it is read
    targets = LatencyTargets(ttft_ms=500)
    add(core, "old", [1, 2], targets=targets, asked_time=-100.0)
    add(core, "later", [1, 2], asked_time=1e6)  # its machine's clock says what cannot be
    add(core, "new", [1, 2])
    old, later, new = core.scheduler.requests.values()
    assert (old.targets, old.age_s) == (targets, old.arrival_time + 100)
    assert (later.age_s, new.age_s, new.targets) == (0, 0, None)


def test_no_priority_starves() -> None:
    """Urgent requests that keep coming overtake one that waits only until it has waited as long as they are urgent."""
    core, _ = make_core(max_num_seqs=1, queue_policy="priority")
    add(core, "first", [1, 2, 3], max_tokens=2)
    core.step()
    add(core, "patient", [1, 2, 3], max_tokens=2, priority=3)
    events = core.take_events()
    for number in range(100):
        add(core, f"urgent-{number}", [1, 2, 3], max_tokens=2)
        core.step()
        events += core.take_events()
    order = order_of(events + run(core))
    assert 0 < order.index("patient") < 50


def test_the_least_urgent_request_is_preempted() -> None:
    core, _ = make_core(num_blocks=10, queue_policy="priority")
    prompts = {str(number): [number, 1, 2, 3, number] for number in range(4)}
    for number, (request_id, prompt) in enumerate(prompts.items()):
        add(core, request_id, prompt, max_tokens=16, priority=-50 * number)
    events = run(core)
    assert tokens_of(events) == {request_id: reference(prompt, 16) for request_id, prompt in prompts.items()}
    preempted = {
        e.request_id: e.num_preemptions for e in events if isinstance(e, m.TokensGenerated) and e.finish_reason
    }
    assert preempted["3"] == 0
    assert preempted["0"] > 0
    assert_idle(core)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted_requests_give_the_reference_answer(mode: str) -> None:
    core, _ = make_core(num_blocks=10, preemption_mode=mode, swap_space_gb=1e-5)
    wanted = {}
    for number in range(4):
        prompt = [number, 1, 2, 3, number]
        add(core, str(number), prompt, max_tokens=16)
        wanted[str(number)] = reference(prompt, 16)
    events = run(core)
    assert tokens_of(events) == wanted
    num_preemptions = max(event.num_preemptions for event in events if isinstance(event, m.TokensGenerated))
    assert num_preemptions > 0
    assert_idle(core)


@settings(max_examples=examples(60), deadline=None)
@given(
    requests=st.lists(st.tuples(prompts, st.integers(1, 12)), min_size=1, max_size=8),
    num_blocks=st.integers(11, 30),
    chunk_size=st.integers(1, 16),
    budget=st.integers(4, 32),
    mode=st.sampled_from(["recompute", "swap"]),
    host_cache_gb=st.sampled_from([0.0, 3e-7]),  # none, or ten blocks
    released=st.sets(st.integers(0, 7), max_size=3),
    when=st.integers(0, 12),
)
def test_any_mixture_gives_the_reference_answers(
    requests: list[tuple[list[int], int]],
    num_blocks: int,
    chunk_size: int,
    budget: int,
    mode: str,
    host_cache_gb: float,
    released: set[int],
    when: int,
) -> None:
    core, _ = make_core(
        num_blocks=num_blocks,
        chunk_size=chunk_size,
        max_num_batched_tokens=budget,
        max_num_seqs=4,
        preemption_mode=mode,
        swap_space_gb=1e-6,
        host_cache_gb=host_cache_gb,
    )
    for number, (prompt, max_tokens) in enumerate(requests):
        add(core, str(number), prompt, max_tokens)
    events = []
    for _ in range(when):
        core.step()
        events += core.take_events()
        assert core.scheduler.check_integrity() == []
    for number in released:
        core.handle(m.Release(str(number)))
    answers = tokens_of(events + run(core))
    for number, (prompt, max_tokens) in enumerate(requests):
        if number not in released:
            assert answers[str(number)] == reference(prompt, max_tokens)
    assert_idle(core)


@settings(max_examples=examples(40), deadline=None)
@given(
    requests=st.lists(st.tuples(prompts, st.integers(1, 8)), min_size=2, max_size=6),
    released=st.integers(0, 5),
    after_calls=st.integers(0, 30),
)
def test_a_release_in_mid_step_disturbs_nobody(
    requests: list[tuple[list[int], int]], released: int, after_calls: int
) -> None:
    core, _ = make_core(num_blocks=14, chunk_size=5, max_num_seqs=4)
    for number, (prompt, max_tokens) in enumerate(requests):
        add(core, str(number), prompt, max_tokens)
    calls = iter(range(10**6))

    def between_layers() -> None:
        if next(calls) == after_calls:
            core.handle(m.Release(str(released)))
            add(core, "late", [1, 2, 3, 4, 5], 3)

    events: list[m.Event] = []
    while core.end(core.begin(core.prepare()), between_layers):
        events += core.take_events()
        assert core.scheduler.check_integrity() == []
    answers = tokens_of(events + core.take_events())
    for number, (prompt, max_tokens) in enumerate(requests):
        if number != released:
            assert answers[str(number)] == reference(prompt, max_tokens)
    assert answers.get("late", reference([1, 2, 3, 4, 5], 3)) == reference([1, 2, 3, 4, 5], 3)
    core.handle(m.Release(str(released)))
    assert_idle(core)


@pytest.mark.parametrize("released", [["second"], ["first", "second"]])
@pytest.mark.parametrize("num_steps", [0, 3])
def test_a_release_after_the_batch_is_decided_disturbs_nobody(released: list[str], num_steps: int) -> None:
    """Results of transfers are taken in after that, and with them the commands that came before."""
    core, _ = make_core(num_blocks=6, max_num_seqs=2)
    prompts = {"first": [1, 2, 3], "second": [4, 5, 6, 7, 8], "third": [9, 10]}
    for name, prompt in prompts.items():
        add(core, name, prompt)
    for _ in range(num_steps):
        core.step()
    output = core.prepare()
    events = core.take_events()
    for name in released:
        core.handle(m.Release(name))
    assert core.end(core.begin(output)), "the third one can start"
    answers = tokens_of([*events, *run(core)])
    for name in prompts.keys() - set(released):
        assert answers[name] == reference(prompts[name], 8)
    assert_idle(core)


def test_a_newcomer_never_gets_a_block_that_the_step_under_way_writes() -> None:
    core, _ = make_core(num_blocks=6, enable_prefix_caching=False)
    add(core, "first", [1] * 4, 9)
    add(core, "second", [2] * 7, 9)
    core.step()
    blocks: list[int] = []

    def between_layers() -> None:
        core.handle(m.Release("second"))  # two blocks, of which the step writes one
        if "third" not in core.scheduler.requests:
            add(core, "third", [3] * 16, mode=m.RequestMode.REMOTE)
        core.begin_remote()
        blocks.extend(core.scheduler.requests["third"].block_ids)
        assert core.scheduler.check_integrity() == []

    core.end(core.begin(core.prepare()), between_layers)
    assert not blocks
    core.prepare()
    assert len(core.scheduler.requests["third"].block_ids) == 4


def test_a_failing_step_costs_its_own_requests_only() -> None:
    core, runner = make_core()
    add(core, "a", [1, 2, 3])
    runner.fail_next = True
    events = run(core)
    assert [type(event) for event in events] == [m.RequestFailed]
    add(core, "b", [4, 5])
    assert tokens_of(run(core))["b"] == reference([4, 5], 8)
    assert_idle(core)


def test_a_prompt_that_cannot_fit_is_refused() -> None:
    core, _ = make_core(num_blocks=3)
    add(core, "a", list(range(3 * BLOCK_SIZE)))
    (event,) = run(core)
    assert isinstance(event, m.RequestFailed)
    assert (event.grpc_code, event.field) == ("INVALID_ARGUMENT", "prompt_token_ids")


@pytest.mark.parametrize(
    ("params", "num_tokens", "reason", "stop_token_id"),
    [
        ({"max_tokens": 3}, 3, FinishReason.LENGTH, None),
        ({"max_tokens": 50, "stop": True}, 4, FinishReason.STOP, "fourth"),
        ({"max_tokens": 50, "stop": True, "min_tokens": 4}, 4, FinishReason.STOP, "fourth"),
        ({"max_tokens": 5, "stop": True, "min_tokens": 5}, 5, FinishReason.LENGTH, None),
    ],
)
def test_ends(params: dict[str, int], num_tokens: int, reason: FinishReason, stop_token_id: str | None) -> None:
    answer = reference([7, 7, 7], 8)
    fourth = answer[3]
    assert fourth not in answer[:3] + answer[4:5]
    stop = (fourth,) if params.pop("stop", False) else ()
    core, _ = make_core()
    add(core, "a", [7, 7, 7], params=SamplingParams(temperature=0.0, stop_token_ids=stop, **params))
    events = run(core)
    assert tokens_of(events)["a"] == answer[:num_tokens]
    assert events[-1].finish_reason is reason
    assert events[-1].stop_token_id == (fourth if stop_token_id else None)


def test_the_context_ends_an_answer() -> None:
    core, runner = make_core(num_blocks=4)
    add(core, "a", [1, 2, 3], max_tokens=500)
    events = run(core)
    assert len(tokens_of(events)["a"]) == runner.info.max_model_len - 3
    assert events[-1].finish_reason is FinishReason.LENGTH


def test_a_resumed_request_continues_its_answer() -> None:
    answer = reference([3, 1, 4], 10)
    core, _ = make_core()
    add(core, "a", [3, 1, 4], max_tokens=10, output_token_ids=answer[:6])
    assert tokens_of(run(core))["a"] == answer[6:]


def test_status_says_what_is_there() -> None:
    core, _ = make_core(num_blocks=20)
    add(core, "a", list(range(9)), max_tokens=3)
    core.step()
    core.handle(m.GetStatus(5))
    *_, status = core.take_events()
    assert (status.call_id, status.integrity) == (5, "ok")
    assert (status.load.num_requests_running, status.load.num_free_blocks) == (1, 17)
    core.scheduler.requests["a"].block_ids.pop()
    core.handle(m.GetStatus(6))
    (status,) = core.take_events()
    assert "ref_cnt" in status.integrity


def test_newcomers_are_named_for_the_routers_that_count_them_until_then() -> None:
    core, _ = make_core()
    add(core, "a#7", [1, 2, 3], max_tokens=2)  # the front numbers what is asked with the same id
    add(core, "b", list(range(10_000)), max_tokens=2)  # refused at once: nobody should go on counting it, either
    assert core.take_counted() == (request_tag("a"), request_tag("b"))
    assert core.take_counted() == ()
    run(core)
    assert core.take_counted() == ()


def test_a_request_is_not_computed_again_before_its_next_token_is_known() -> None:
    core, _ = make_core()
    add(core, "a", [1, 2, 3], max_tokens=2)
    begun = core.begin(core.prepare())
    assert list(begun.output.num_tokens.values()) == [3]
    assert not core.scheduler.schedule(now=0.0).num_tokens
    core.end(begun)
    assert tokens_of(core.take_events() + run(core))["a"] == reference([1, 2, 3], 2)
    assert_idle(core)


def test_a_step_that_moves_nothing_asks_neither_connector_nor_device_about_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connector is polled while its jobs are under way, and a device copies only if there is something to copy."""
    connector = MemoryConnector(ConnectorConfig(epoch="e1", worker_id="polled"))
    core, device = make_core(connector=connector)
    polled: list[str] = []
    poll = connector.poll
    monkeypatch.setattr(connector, "poll", lambda: polled.append("poll") or poll())
    monkeypatch.setattr(device, "copy", lambda copies: polled.append("copy"))
    add(core, "a", [1, 2, 3, 4, 5], max_tokens=6)
    assert tokens_of(run(core))["a"] == reference([1, 2, 3, 4, 5], 6)
    assert not polled
    add(core, "b", [1, 2, 3, 4, 5], params=SamplingParams(temperature=0.0), mode=m.RequestMode.PREFILL)
    published = [one for one in run(core) if isinstance(one, m.BlocksPublished)]
    assert sum(len(one.blocks) for one in published) == 2
    assert set(polled) == {"poll"}
    num_polls = len(polled)
    core.step()
    assert len(polled) == num_polls, "what was published is told, and nothing is under way any more"
    core.handle(m.Release("b"))
    assert_idle(core)
