"""Stages that compute decodes at the same time: groups of rows, and the way of drawn tokens back to the first stage."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from common.errors import InternalError
from common.sampling import SamplingParams
from common.types import SampledToken
from engine.device import Device
from engine.device_thread import DeviceThread
from engine.local.device import LocalDevice
from engine.models.stage import Stage
from engine.ranks.drawn_tokens import KEPT_STEPS, StepsAndTokens, ToldTokens
from engine.ranks.group import OneRank
from engine.ranks.messages import Channel, Done, Step, Tokens
from engine.ranks.pipeline import GROUP_ROWS, Pipeline
from engine.ranks.shared_memory import exchange_library
from engine.sampling.draws import draw
from engine.step import Drawn, Scoring, StepInput, StepRow
from tests.engine.ranks.devices import ids, settings_of, staged
from tests.support.fake_device import PATIENCE_S

needs_exchange = pytest.mark.skipif(exchange_library() is None, reason="the library was not built")

LIKELIEST = draw(SamplingParams(temperature=0.0), 0)
NUM_ROWS, PROMPT = 4, 3


def steps_of(device: Device) -> list[StepInput]:
    """A prompt in each row, and two steps that begin with what the step before draws."""
    numbers = [device.next_number() for _ in range(3)]
    prompts = [
        StepRow(token_ids=[5 + row, 6, 7], num_computed_tokens=0, block_ids=[row], draw=LIKELIEST)
        for row in range(NUM_ROWS)
    ]
    steps = [StepInput(number=numbers[0], rows=prompts)]
    for before, number in enumerate(numbers[1:]):
        rows = [
            StepRow(
                token_ids=[0],
                num_computed_tokens=PROMPT + before,
                block_ids=[row],
                draw=LIKELIEST,
                first=Drawn(numbers[before], row),
            )
            for row in range(NUM_ROWS)
        ]
        steps.append(StepInput(number=number, rows=rows))
    return steps


def tokens_of(device: Device) -> list[list[int | None]]:
    """One step is begun ahead of each that ends, as the engine does."""
    tickets, drawn = [], []
    for step in steps_of(device):
        tickets.append(device.begin(step))
        if len(tickets) == 2:
            drawn.append(ids(device.end(tickets.pop(0)).tokens))
    return [*drawn, ids(device.end(tickets.pop()).tokens)]


class Watched:
    """Notes what each stage begins to compute, and holds up the last one until the first one has begun what comes
    next: the same step's other group, or the next step's first one."""

    def __init__(self, num_stages: int) -> None:
        self._last = num_stages - 1
        self._begun: dict[tuple[int, int], threading.Event] = {
            (position, group): threading.Event() for position in (PROMPT, PROMPT + 1) for group in range(2)
        }
        self.num_awaited = 0
        self._compute = LocalDevice._forward_from

    def forward_from(self, device: LocalDevice, rows: Sequence[StepRow], *arguments: object) -> torch.Tensor:
        stage, position, row = device._pipeline.stage.number, rows[0].num_computed_tokens, rows[0].block_ids[0]
        group = row * 2 // NUM_ROWS
        if position >= PROMPT:
            if stage == 0:
                self._begun[position, group].set()
            elif stage == self._last and (after := self._begun.get((position + group, 1 - group))) is not None:
                assert after.wait(PATIENCE_S), f"group {group} at position {position} ended before the next one began"
                self.num_awaited += 1
        return self._compute(device, rows, *arguments)  # type: ignore[arg-type]


@needs_exchange
@pytest.mark.parametrize("in_thread", [False, True])
def test_the_first_stage_begins_a_group_while_the_last_one_computes_another(
    model: Path, in_thread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the same step, and in the next one, whose first tokens the last stage has just drawn."""
    expected = tokens_of(LocalDevice(model, settings_of(1)))
    monkeypatch.setattr("engine.ranks.pipeline.GROUP_ROWS", 2)
    watched = Watched(2)
    monkeypatch.setattr(LocalDevice, "_forward_from", lambda *arguments: watched.forward_from(*arguments))
    with staged(model, 2) as device:
        thread = DeviceThread(device) if in_thread else None
        given = tokens_of(thread or device)
        if thread is not None:
            thread.close()
    assert given == expected
    assert watched.num_awaited == 3  # all groups of both steps but the very last one


def decode(**changes: object) -> StepRow:
    values = {"token_ids": [0], "num_computed_tokens": 3, "block_ids": [0], "draw": LIKELIEST, "first": Drawn(1, 0)}
    return StepRow(**{**values, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("num_stages", "num_rows", "sizes"),
    [
        (1, 4 * GROUP_ROWS, None),
        (2, 2 * GROUP_ROWS - 1, None),
        (2, 2 * GROUP_ROWS + 1, [GROUP_ROWS, GROUP_ROWS + 1]),
        (2, 10 * GROUP_ROWS, [5 * GROUP_ROWS] * 2),
        (4, 3 * GROUP_ROWS, [GROUP_ROWS] * 3),
    ],
)
def test_groups_have_a_number_of_rows_at_least(num_stages: int, num_rows: int, sizes: list[int] | None) -> None:
    groups = Pipeline(Stage(0, num_stages), OneRank()).groups([decode()] * num_rows)
    assert (groups and [len(group) for group in groups]) == sizes
    assert [row for group in groups or [] for row in group] == (list(range(num_rows)) if groups else [])


@pytest.mark.parametrize(
    "changes",
    [{"first": None}, {"draw": None}, {"score": Scoring(start=0, token_ids=[1], num_top=0)}, {"num_pooled": 1}],
)
def test_a_step_with_another_row_is_computed_as_one(changes: dict[str, object]) -> None:
    rows = [*[decode()] * (4 * GROUP_ROWS), decode(**changes)]
    assert Pipeline(Stage(0, 2), OneRank()).groups(rows) is None


def drawn(*token_ids: int | None) -> list[SampledToken | None]:
    return [None if token_id is None else SampledToken(token_id) for token_id in token_ids]


def test_tokens_are_told_once_they_are_asked_for_and_drawn() -> None:
    told: list[Tokens] = []
    tokens = ToldTokens(told.append)
    tokens.drew(1, [0, 1, 2], drawn(10, 11, 12))
    assert not told, "nobody asked"
    tokens.ask([decode(first=Drawn(1, 2)), decode(first=None), decode(first=Drawn(2, 1)), decode(first=Drawn(2, 3))])
    assert told == [Tokens(1, [2], [12])]
    tokens.drew(2, [0, 1], drawn(20, 21))
    tokens.drew(2, [2, 3], drawn(22, None))
    assert told[1:] == [Tokens(2, [1], [21]), Tokens(2, [3], [None])]


def test_tokens_of_long_ago_are_forgotten() -> None:
    tokens = ToldTokens(lambda _: None)
    for step in range(1, KEPT_STEPS + 2):
        tokens.drew(step, [0], drawn(step))
    tokens.ask([decode(first=Drawn(2, 0))])
    with pytest.raises(InternalError, match="row 0 of step 1 drew no token that is still known"):
        tokens.ask([decode(first=Drawn(1, 0))])


@contextmanager
def said() -> Iterator[tuple[Callable[..., None], StepsAndTokens]]:
    ours, theirs = map(Channel, socket.socketpair())
    try:
        yield ours.send, StepsAndTokens(theirs)
    finally:
        ours.close()
        theirs.close()


def test_steps_and_tokens_come_in_any_order() -> None:
    with said() as (send, other):
        send(Tokens(1, [0, 1], [10, None]))
        for number in (1, 2, 3):
            send(Step.of(StepInput(number=number, rows=[])))
        send(Tokens(2, [0], [20]))
        assert other.next_step().number == 1
        assert other.token(Drawn(2, 0)) == 20, "it reads on"
        assert [other.next_step().number for _ in range(2)] == [2, 3]
        assert other.token(Drawn(1, 0)) == 10
        with pytest.raises(InternalError, match="row 1 of step 1 drew no token"):
            other.token(Drawn(1, 1))


def test_other_messages_are_refused() -> None:
    with said() as (send, other):
        send(Done(1))
        with pytest.raises(ValueError, match="rank 0 said Done"):
            other.next_step()
