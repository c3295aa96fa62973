"""Devices of several ranks in this process, and what tests ask of them."""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import msgspec
import torch

from common.config import EngineSettings
from common.sampling import SamplingParams
from common.types import SampledToken
from engine import messages as m
from engine.core import EngineCore
from engine.device import Device, do_nothing
from engine.ranks import process
from engine.ranks.device import RankedDevice
from engine.ranks.launch import Rank
from engine.ranks.messages import Channel, Join, Message, Ready
from engine.step import Draw, LogitEdits, Scoring, StepRow
from kv_store.base import ConnectorConfig
from kv_store.registry import create_connector
from tests.engine.tiny_models import BLOCK_SIZE, VOCAB_SIZE
from tests.support.fake_device import add, assert_idle, run, tokens_of

Serve: TypeAlias = Callable[[Channel, Join, Sequence[int]], None]

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [
    [(7 * number + 3 * place) % VOCAB_SIZE for place in range(length)] for number, length in enumerate((61, 20, 43))
]


class ThreadRank(threading.Thread):
    """A rank in a thread of this process; waiting for others lets go of Python's lock."""

    def __init__(self, serve: Serve) -> None:
        super().__init__(daemon=True)
        self.pid = os.getpid()
        self._serve = serve
        ours, theirs = socket.socketpair()
        self.ours, self.theirs = Channel(ours), Channel(theirs)

    def run(self) -> None:
        files: list[int] = []
        try:
            message, files = self.theirs.receive()
            assert isinstance(message, Join)
            self._serve(self.theirs, message, files)
        except (EOFError, OSError):
            pass
        finally:
            self.theirs.close()
            for file in files:
                os.close(file)

    def kill(self) -> None:
        raise AssertionError("it does not end")

    def wait(self, timeout: float) -> None:
        self.join(timeout)
        if self.is_alive():
            raise subprocess.TimeoutExpired("a rank", timeout)


def in_threads(serve: Serve = process.serve) -> Callable[[int, int], Rank]:
    def start(number: int, num_threads: int) -> Rank:
        thread = ThreadRank(serve)
        thread.start()
        return Rank(number, thread, thread.ours)

    return start


def settings_of(num_ranks: int, **changes: object) -> EngineSettings:
    values = {
        "device": "cpu",
        "dtype": "float32",
        "block_size": BLOCK_SIZE,
        "num_blocks": 40,
        "max_model_len": 128,
        "chunk_size": 24,
        "num_threads": 1,
        "tensor_parallel_size": num_ranks,
        **changes,
    }
    return EngineSettings.model_validate(values)


@contextmanager
def ranked(model: Path, num_ranks: int, **changes: object) -> Iterator[RankedDevice]:
    device = RankedDevice(model, settings_of(num_ranks, **changes), in_threads())
    try:
        yield device
    finally:
        device.close()


def answers(device: Device, settings: EngineSettings) -> tuple[dict[str, list[int]], int]:
    """Of all prompts at once, then of the last one again. And how often one was preempted."""
    ticks = iter(range(10**9))
    connector = create_connector("memory", ConnectorConfig(worker_id="test"), settings.tensor_parallel_size)
    core = EngineCore(settings, device, connector, lambda: float(next(ticks)), lambda: None)
    for number, prompt in enumerate(PROMPTS):
        add(core, str(number), prompt, params=GREEDY)
    events = run(core)
    add(core, "again", PROMPTS[-1], params=GREEDY)
    events += run(core)
    assert_idle(core)
    core.close()
    preempted = max(event.num_preemptions for event in events if isinstance(event, m.TokensGenerated))
    return tokens_of(events), preempted


def rows() -> list[StepRow]:
    """One of each kind."""
    edits = LogitEdits(repetition_penalty=1.5)
    score = Scoring(start=0, token_ids=[2, 3], num_top=1)
    return [
        StepRow(token_ids=[5, 6, 7], num_computed_tokens=0, block_ids=[4], draw=Draw(index=0, temperature=0.0)),
        StepRow(token_ids=[9], num_computed_tokens=0, block_ids=[5], draw=Draw(index=3, seed=7, num_top=2)),
        StepRow(token_ids=[1, 2], num_computed_tokens=0, block_ids=[6], draw=Draw(index=0, seed=1, edits=edits)),
        StepRow(token_ids=[1, 2, 3], num_computed_tokens=0, block_ids=[7], score=score),
        StepRow(token_ids=[8, 9], num_computed_tokens=0, block_ids=[8], num_pooled=2),
    ]


def ids(tokens: list[SampledToken | None]) -> list[int | None]:
    return [None if token is None else token.token_id for token in tokens]


@contextmanager
def staged(model: Path, num_stages: int, num_ranks: int = 1, **changes: object) -> Iterator[RankedDevice]:
    """Each stage has so many ranks."""
    with ranked(model, num_ranks, pipeline_parallel_size=num_stages, **changes) as device:
        for plane in device.planes():  # reading a slot that was never written shows
            torch.as_tensor(plane.cache).fill_(float("nan"))
        yield device


class OldChannel(Channel):
    """Of a rank of another release."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def receive(self) -> tuple[Message, list[int]]:
        return self._channel.receive()

    def send(self, message: Message, files: Sequence[int] = (), while_full: Callable[[], None] = do_nothing) -> None:
        if isinstance(message, Ready):
            message = msgspec.structs.replace(message, release="0.0.1")
        self._channel.send(message, files, while_full)


def repeat(work: Callable[[], object]) -> None:
    """Until it raises something."""
    give_up = time.monotonic() + 60
    while time.monotonic() < give_up:
        work()
        time.sleep(0.02)
