"""When requests of batches may be with workers, and which make way."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace

import pytest

from common.types import FinishReason, SampledToken
from router.fleet.registry import Registry
from router.limits.admission import Admission
from router.limits.demand import Demand
from router.limits.gate import Gate
from router.running.request import GenerationRequest, NewTokens, Progress
from router.running.room import Place, Room
from router.serving.generation import Generation
from tests.router.test_answer import requests
from tests.router.tiny_tokenizer import eos_id, ids_of

TOKEN_IDS = ids_of("The capital of France is Paris.")


class Fleet:
    """Requests of batches that ask for room beside others."""

    def __init__(self, **given: float) -> None:
        self.num_others = 0
        self.room = Room(lambda: self.num_others, **{"most": 2, "share": 0.0, **given})  # type: ignore[arg-type]
        self.inside: list[str] = []
        self.stopped: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    def begin(self, *names: str) -> None:
        for name in names:
            self.tasks[name] = asyncio.create_task(self._run(name))

    async def _run(self, name: str) -> None:
        async with self.room.place() as place:
            self.inside.append(name)
            try:
                await self._hold(place)
                self.stopped.append(name)
            finally:
                self.inside.remove(name)

    async def _hold(self, place: Place) -> None:
        stopped = asyncio.Event()
        place.on_way(stopped.set)
        await stopped.wait()

    async def others(self, number: int) -> None:
        self.num_others = number
        self.room.look()
        await settled()


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_all_have_the_fleet_if_nobody_else_asks() -> None:
    fleet = Fleet()
    fleet.begin("a", "b", "c")
    await settled()
    assert fleet.inside == ["a", "b"]
    fleet.tasks["a"].cancel()
    await settled()
    assert fleet.inside == ["b", "c"]


async def test_they_make_way_and_come_back() -> None:
    fleet = Fleet()
    fleet.begin("a", "b")
    await settled()
    await fleet.others(1)
    assert (fleet.inside, sorted(fleet.stopped)) == ([], ["a", "b"])
    fleet.begin("c", "d")
    await settled()
    assert fleet.inside == []
    await fleet.others(0)
    assert fleet.inside == ["c", "d"]


async def test_a_share_goes_on_beside_others() -> None:
    fleet = Fleet(share=0.1)
    await fleet.others(9)
    fleet.begin("a", "b", "c")
    await settled()
    assert fleet.inside == []
    await fleet.others(10)
    assert fleet.inside == ["a"]
    await fleet.others(1000)
    assert fleet.inside == ["a", "b"]
    await fleet.others(19)
    assert (fleet.inside, fleet.stopped) == (["a"], ["b"])
    await fleet.others(0)
    assert fleet.inside == ["a", "c"]


async def test_quiet_comes_first() -> None:
    now = 0.0
    fleet = Fleet(quiet_s=5.0, clock=lambda: now)  # type: ignore[arg-type]
    fleet.begin("a")
    await settled()
    assert fleet.inside == ["a"], "nobody has asked before"
    await fleet.others(1)
    now = 100.0
    await fleet.others(0)
    fleet.begin("b")
    await settled()
    assert fleet.inside == [], "quiet begins with the last one's end"
    now = 104.9
    fleet.room.look()
    await settled()
    assert fleet.inside == []
    now = 105.0
    fleet.room.look()
    await settled()
    assert fleet.inside == ["b"]


@pytest.mark.parametrize("leaves", [lambda fleet: fleet.tasks["c"].cancel(), lambda _: None])
async def test_a_turn_that_nobody_takes_is_the_next_ones(leaves: Callable[[Fleet], object]) -> None:
    fleet = Fleet(most=1)
    fleet.begin("a", "c", "d")
    await settled()
    fleet.tasks["a"].cancel()
    leaves(fleet)  # with its turn on the way, or before
    await settled()
    assert len(fleet.inside) == 1
    leaves(fleet)
    await settled()
    fleet.tasks[fleet.inside[0]].cancel()
    await settled()
    assert len(fleet.inside) <= 1
    for task in fleet.tasks.values():
        task.cancel()
    await asyncio.gather(*fleet.tasks.values(), return_exceptions=True)
    assert fleet.inside == []
    fleet.begin("e")
    await settled()
    assert fleet.inside == ["e"]


class SlowDispatcher:
    """Has workers that give one token at a time, as many loops later as is drawn."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self.num_runs = 0

    async def run(
        self, _request: GenerationRequest, _progress: Progress, sent: list[int]
    ) -> AsyncGenerator[NewTokens, None]:
        self.num_runs += 1
        for token_id in TOKEN_IDS[len(sent) :]:
            for _ in range(self._draw.randrange(4)):
                await asyncio.sleep(0)
            sent.append(token_id)
            yield NewTokens([SampledToken(token_id)])
        yield NewTokens([], FinishReason.STOP, eos_id())


@pytest.mark.parametrize("seed", range(8))
async def test_no_token_is_lost_or_comes_twice(seed: int) -> None:
    draw = random.Random(seed)
    others = 0
    room = Room(lambda: others, most=1, share=0.0)
    dispatcher = SlowDispatcher(draw)
    generation = Generation(dispatcher, Admission(Registry([], []), Demand(), Gate()))  # type: ignore[arg-type]
    asked = replace(requests(1)[0], room=room)

    async def answer() -> list[int]:
        return [token.token_id async for _, output in generation.generate(asked) for token in output.tokens]

    answering = asyncio.create_task(answer())
    for _ in range(200):
        await asyncio.sleep(0)
        if draw.random() < 0.4:
            others = 1 - others
            room.look()
    others = 0
    room.look()
    assert await asyncio.wait_for(answering, 20) == TOKEN_IDS
    assert dispatcher.num_runs > 1


async def test_others_that_come_while_a_turn_is_on_its_way() -> None:
    fleet = Fleet()
    await fleet.others(1)
    fleet.begin("a")
    await settled()
    fleet.num_others = 0
    fleet.room.look()  # its turn is on the way
    fleet.num_others = 1
    fleet.room.look()
    await settled()
    assert fleet.inside == []
    await fleet.others(0)
    assert fleet.inside == ["a"]


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_one_goes_on_once_they_have_waited_long(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    fleet = Fleet(share=0.02, patience_s=300.0, clock=clock)  # type: ignore[arg-type]
    await fleet.others(3)
    fleet.begin("a", "b", "c")
    await settled()
    clock.now = 299.0
    await fleet.others(4)
    assert fleet.inside == []
    clock.now = 300.0
    await fleet.others(3)
    assert fleet.inside == ["a"], "one at a time"
    await fleet.others(20)
    assert (fleet.inside, fleet.stopped) == (["a"], []), "and to its end"
    fleet.tasks["a"].cancel()
    await settled()
    assert fleet.inside == ["b"], "the next one does not wait as long again"
    assert len([record for record in caplog.records if "waited long" in record.message]) == 1
    await fleet.others(0)
    assert fleet.inside == ["b", "c"]
    await fleet.others(3)
    assert sorted(fleet.stopped) == ["b", "c"], "there was room: nobody has waited since"


async def test_one_goes_on_although_traffic_has_only_short_gaps() -> None:
    clock = Clock()
    fleet = Fleet(quiet_s=5.0, patience_s=300.0, clock=clock)  # type: ignore[arg-type]
    await fleet.others(1)
    await fleet.others(0)
    fleet.begin("a", "b")
    for second in range(1, 300):
        clock.now = float(second)
        await fleet.others(second % 2)
        assert fleet.inside == []
    clock.now = 301.0
    await fleet.others(0)
    assert fleet.inside == ["a"]
    await fleet.others(1)
    assert fleet.inside == ["a"]


async def test_those_that_come_later_wait_for_themselves() -> None:
    clock = Clock()
    fleet = Fleet(patience_s=300.0, clock=clock)  # type: ignore[arg-type]
    await fleet.others(1)
    fleet.begin("a")
    await settled()
    clock.now = 300.0
    await fleet.others(2)
    assert fleet.inside == ["a"]
    fleet.tasks["a"].cancel()
    await settled()
    clock.now = 600.0
    fleet.begin("b")
    await settled()
    assert fleet.inside == []


async def test_patience_ends_although_nothing_changes() -> None:
    fleet = Fleet(patience_s=0.02)
    await fleet.others(1)
    fleet.begin("a")
    await settled()
    assert fleet.inside == []
    async with asyncio.timeout(20):
        while not fleet.inside:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
