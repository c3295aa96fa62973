"""Where stages stand, how they split a step, and the way of hidden states between two of them."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from common.errors import InternalError, LostRankError, StartupError
from engine.models.stage import Stage
from engine.ranks.group import OneRank
from engine.ranks.layout import Layout
from engine.ranks.link import SocketLink
from engine.ranks.pipeline import MICRO_BATCH_TOKENS, Pipeline, split
from engine.step import Draw, Scoring, StepRow


def row(num_tokens: int, num_computed_tokens: int = 0) -> StepRow:
    token_ids = list(range(num_computed_tokens, num_computed_tokens + num_tokens))
    return StepRow(
        token_ids=token_ids,
        num_computed_tokens=num_computed_tokens,
        block_ids=[],
        draw=Draw(index=0),
        score=Scoring(start=0, token_ids=[], num_top=0),
        num_pooled=1,
    )


@given(st.integers(1, 100), st.integers(1, 12))
def test_stages_have_all_layers_in_order(num_layers: int, count: int) -> None:
    stages = [Stage(number, count) for number in range(count)]
    assert [stage.is_first for stage in stages] == [True, *[False] * (count - 1)]
    assert [stage.is_last for stage in stages] == [*[False] * (count - 1), True]
    if num_layers < count:
        with pytest.raises(StartupError, match=f"size {count} leaves a stage without any of {num_layers} layers"):
            stages[-1].layers(num_layers)
        return
    layers = [stage.layers(num_layers) for stage in stages]
    assert [layer for some in layers for layer in some] == list(range(num_layers))
    sizes = list(map(len, layers))
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_rank_0_is_of_the_last_stage() -> None:
    layout = Layout(num_stages=3, ranks_per_stage=2)
    assert [layout.stage(rank).number for rank in range(layout.size)] == [2, 2, 1, 1, 0, 0]
    assert [layout.place_in_stage(rank) for rank in range(6)] == [0, 1, 0, 1, 0, 1]
    assert [layout.before(rank) for rank in range(6)] == [2, 3, 4, 5, None, None]
    assert [layout.after(rank) for rank in range(6)] == [None, None, 0, 1, 2, 3]
    assert [list(layout.stage_mates(rank)) for rank in (1, 4)] == [[0, 1], [4, 5]]


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 9)), min_size=1, max_size=9), st.integers(1, 8))
def test_parts_have_all_tokens_in_order(sizes: list[tuple[int, int]], count: int) -> None:
    rows = [row(*each) for each in sizes]
    total = sum(len(each.token_ids) for each in rows)
    count = min(count, total)
    parts = split(rows, count)
    tokens = [sum(len(each.token_ids) for each in part) for part in parts]
    assert len(parts) == count
    assert max(tokens) - min(tokens) <= 1
    assert sum(tokens) == total
    pieces = [piece for part in parts for piece in part]
    for piece in pieces:  # the test's tokens are their positions
        assert piece.token_ids[0] == piece.num_computed_tokens
        assert (piece.draw, piece.score, piece.num_pooled) == (None, None, 0)
    assert [token for piece in pieces for token in piece.token_ids] == [
        token for each in rows for token in each.token_ids
    ]


class Ends:
    """A `Link` that gives tensors and keeps tensors."""

    def __init__(self, *given: torch.Tensor) -> None:
        self.given = list(given)
        self.taken: list[torch.Tensor] = []

    def send(self, values: torch.Tensor) -> None:
        self.taken.append(values)

    def receive(self, meanwhile: object = None) -> torch.Tensor:
        return self.given.pop(0)

    def close(self) -> None:
        pass


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [
        ([2 * MICRO_BATCH_TOKENS - 1], [127]),
        ([2 * MICRO_BATCH_TOKENS], [64, 64]),
        ([1] * 100 + [92], [64, 64, 64]),
        ([4096], [512] * 8),  # no more than four for each stage
    ],
)
def test_parts_of_a_step_have_64_tokens_at_least(sizes: list[int], parts: list[int]) -> None:
    before = Ends(*(torch.full((size, 4), float(number)) for number, size in enumerate(parts)))
    after = Ends()
    pipeline = Pipeline(Stage(1, 2 if len(sizes) == 1 else 3), OneRank(), before, after)
    rows = [row(size) for size in sizes]

    def compute(some: list[StepRow], hidden: torch.Tensor | None) -> torch.Tensor:
        assert hidden is not None
        assert len(hidden) == sum(len(each.token_ids) for each in some)
        return hidden + 1

    whole = pipeline.forward(rows, compute, lambda: None)  # type: ignore[arg-type]
    assert [len(each) for each in after.taken] == parts
    assert torch.equal(whole, torch.cat(after.taken))
    assert whole[-1, 0] == len(parts)


def test_hidden_states_of_another_number_of_tokens_are_refused() -> None:
    pipeline = Pipeline(Stage(1, 2), OneRank(), Ends(torch.zeros(3, 4)))
    with pytest.raises(InternalError, match="hidden states of 3 tokens came for 2"):
        pipeline.forward([row(2)], lambda *_: torch.zeros(1), lambda: None)


def test_a_row_comes_behind_those_whose_kv_it_reads() -> None:
    """A drafted token at position 70 follows a row that begins at 0."""
    pipeline = Pipeline(Stage(0, 2), OneRank())
    assert pipeline.order([row(1, 70), row(70), row(1, 9), row(60, 20)]) == [1, 2, 3, 0]
    assert pipeline.order([row(1, 70), row(70)]) is None


@pytest.fixture
def links() -> Iterator[tuple[SocketLink, SocketLink]]:
    one, other = (SocketLink(end, lambda: "") for end in socket.socketpair())
    with closing(one), closing(other):
        yield one, other


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_come_as_they_were(links: tuple[SocketLink, SocketLink], dtype: torch.dtype) -> None:
    sent = [torch.randn(size, 7).to(dtype) for size in (1, 5, 3)]
    sent.append(torch.randn(7, 5).to(dtype).t())
    for values in sent:
        links[0].send(values)
    for values in sent:
        came = links[1].receive()
        assert came.dtype == dtype
        assert torch.equal(came, values)


def test_who_sends_does_not_wait_until_it_is_read(links: tuple[SocketLink, SocketLink]) -> None:
    """Each is larger than what a socket holds."""
    sent = [torch.full((500, 1000), float(number)) for number in range(3)]
    for values in sent:
        links[0].send(values)
    called = []
    assert all(torch.equal(links[1].receive(lambda: called.append(1)), values) for values in sent)


def test_others_are_served_while_nothing_comes(links: tuple[SocketLink, SocketLink]) -> None:
    called = []

    def meanwhile() -> None:
        called.append(1)
        if len(called) == 3:
            links[0].send(torch.ones(1, 2))

    assert torch.equal(links[1].receive(meanwhile), torch.ones(1, 2))
    assert len(called) == 3


def test_a_rank_that_will_send_nothing_is_named() -> None:
    ours, theirs = socket.socketpair()
    asked = []

    def problem() -> str:
        asked.append(1)
        return "rank 1 was stopped by a signal" if len(asked) > 1 else ""

    with theirs, closing(SocketLink(ours, problem)) as link:
        with pytest.raises(LostRankError, match=r"^rank 1 was stopped by a signal$"):
            link.receive()
        theirs.close()
        for action in (link.receive, lambda: link.send(torch.ones(1, 1))):
            with pytest.raises(LostRankError, match=r"^rank 1 was stopped by a signal$"):
                action()


def test_a_rank_that_ends_while_much_is_sent_is_named() -> None:
    ours, theirs = socket.socketpair()
    with closing(SocketLink(ours, lambda: "rank 1 has ended")) as link:
        link.send(torch.ones(1000, 1000))
        theirs.close()
        for thread in threading.enumerate():
            if thread.name == "hidden states":  # which may have ended already
                thread.join()
        with pytest.raises(LostRankError, match="rank 1 has ended"):
            link.send(torch.ones(1, 1))
