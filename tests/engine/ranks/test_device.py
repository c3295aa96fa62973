"""A worker's device of several ranks: the same answers as one rank's, and what becomes of ranks that are lost."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from common.errors import ConfigError, LostRankError, StartupError
from common.logs import setup_logging
from common.model_files import open_model
from engine.blocks.host_tier import BlockCopy, BlockCopyKind
from engine.device import do_nothing
from engine.devices import open_device
from engine.local.device import LocalDevice
from engine.local.memory import weight_bytes
from engine.ranks import process
from engine.ranks.device import RankedDevice
from engine.ranks.launch import join_of_rank
from engine.ranks.messages import Channel, Done, Failed, Join, Message, Step
from engine.ranks.shared_memory import exchange_library
from engine.step import StepInput
from tests.engine.ranks.devices import OldChannel, answers, ids, in_threads, ranked, repeat, rows, settings_of
from tests.engine.tiny_models import FAMILIES, make_model

pytestmark = pytest.mark.skipif(exchange_library() is None, reason="the library was not built")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "mixture", {**FAMILIES["mixtral"], "sliding_window": None})


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_answers_of_dealt_out_experts_are_those_of_one_rank(mixture: Path, num_ranks: int) -> None:
    changes = {"num_blocks": 9, "preemption_mode": "swap", "swap_space_gb": 0.01, "host_cache_gb": 0.001}
    settings = settings_of(1, **changes)
    wanted, _ = answers(LocalDevice(mixture, settings), settings)
    with ranked(mixture, num_ranks, expert_parallel_size=num_ranks, **changes) as device:
        given, num_preemptions = answers(device, settings_of(num_ranks, **changes))
        assert device.kernels_name.endswith(f", {num_ranks} ranks, experts dealt out")
    assert given == wanted
    assert num_preemptions > 0


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"expert_parallel_size": 3}, "is 1 or as many as --tensor-parallel-size, which is 2: not 3"),
        ({"expert_parallel_size": 2, "tensor_parallel_size": 1}, "needs as many processes: set --tensor-parallel-size"),
    ],
)
def test_experts_are_dealt_out_to_as_many_processes_as_compute(
    model: Path, changes: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError, match=f"--expert-parallel-size: {words}"):
        open_device(model, settings_of(2, **changes))


def test_every_kind_of_row(model: Path) -> None:
    expected = LocalDevice(model, settings_of(1)).compute(rows())
    with ranked(model, 2) as device:
        device.warm_up()
        given = device.compute(rows())
        whole, shards = device.info.spec, [plane.spec for plane in device.planes()]
        caches = [torch.as_tensor(plane.cache) for plane in device.planes()]
        assert all(cache[4].count_nonzero() for cache in caches)
    assert ids(given.tokens) == ids(expected.tokens)
    assert [score.token_id for score in given.scores[3]] == [2, 3]
    torch.testing.assert_close(torch.tensor(given.pooled[4]), torch.tensor(expected.pooled[4]), atol=1e-4, rtol=1e-4)
    assert (whole.num_kv_heads, whole.tp_size) == (2, 1)
    assert [(shard.num_kv_heads, shard.tp_rank, shard.tp_size) for shard in shards] == [(1, 0, 2), (1, 1, 2)]
    assert {shard.fingerprint() for shard in shards} == {whole.fingerprint()}


def test_only_what_decides_about_exchanges_is_sent() -> None:
    copies = [BlockCopy(BlockCopyKind.SWAP_OUT, 4, 1), BlockCopy(BlockCopyKind.PROMOTE, 5, 0)]
    step = StepInput(number=3, rows=rows(), copies=copies)
    sent = Step.of(step).as_input()
    assert [row.block_ids[0] for row in sent.rows] == [4, 5, 6, 7, 8]
    assert [row.draw and row.draw.is_likeliest for row in sent.rows] == [True, False, False, None, None]
    assert sent.rows[3].score == step.rows[3].score
    assert sent.rows[4].num_pooled == 2
    assert sent.copies == copies


def test_weights_that_only_fit_by_rank_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed = weight_bytes(open_model(model), 4)
    monkeypatch.setattr("engine.local.memory.available_bytes", lambda: needed - 1)
    with pytest.raises(StartupError, match=r"the weights of "):
        RankedDevice(model, settings_of(2), in_threads())


def test_a_rank_that_cannot_load_is_named(model: Path) -> None:
    def serve(channel: Channel, _join: Join, _files: Sequence[int]) -> None:
        channel.send(Failed("the weights need 7 GiB"))

    with pytest.raises(StartupError, match=r"^rank 1: the weights need 7 GiB$"):
        RankedDevice(model, settings_of(2), in_threads(serve))


def test_a_rank_logs_as_rank_0_does(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging("decode", level="warning", log_format="json")
    join = join_of_rank(settings_of(2), settings_of(1), model, 1, [os.getpid()] * 2)
    setup_logging("decode")

    def serve(channel: Channel, _join: Join, _files: Sequence[int]) -> None:
        process.log.warning("it serves")
        channel.close()

    ours, theirs = socket.socketpair()
    with ours:
        Channel(ours).send(join)
        monkeypatch.setattr(process, "die_with_parent", lambda: None)
        monkeypatch.setattr(process.signal, "signal", lambda *_: None)
        monkeypatch.setattr(process, "serve", serve)
        monkeypatch.setattr("sys.argv", ["process", str(theirs.detach())])
        assert process.main() == 0
    line = msgspec.json.decode(capsys.readouterr().err)
    assert (line["process"], line["message"]) == ("rank 1", "it serves")


def test_a_rank_that_fails_in_a_step_ends_the_device(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ranked(model, 2) as device:
        compute, main = LocalDevice._compute, threading.current_thread()

        def failing(self: LocalDevice, *arguments: object) -> object:
            if threading.current_thread() is not main:
                raise ArithmeticError("a defect")
            return compute(self, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(LocalDevice, "_compute", failing)
        with pytest.raises(LostRankError, match=r"^rank 1: ArithmeticError: a defect$"):
            device.compute(rows())


class LeavingChannel(OldChannel):
    """Of a rank that ends after one step."""

    _is_last = False

    def receive(self) -> tuple[Message, list[int]]:
        if self._is_last:
            raise EOFError
        return super().receive()

    def send(self, message: Message, files: Sequence[int] = (), while_full: Callable[[], None] = do_nothing) -> None:
        self._is_last = isinstance(message, Done)
        self._channel.send(message, files, while_full)


@pytest.mark.slow
def test_a_rank_that_ends_between_steps_is_found(model: Path) -> None:
    def serve(channel: Channel, join: Join, files: Sequence[int]) -> None:
        process.serve(LeavingChannel(channel), join, files)

    device = RankedDevice(model, settings_of(2), in_threads(serve))
    device.check_alive()
    device.compute(rows()[:1])
    with pytest.raises(LostRankError, match=rf"^rank 1 \(process {os.getpid()}\) has ended$"):
        repeat(device.check_alive)
    device.close()


class DeafChannel(OldChannel):
    """Of a rank that reads no step until it may go on."""

    def __init__(self, channel: Channel, may_go_on: threading.Event) -> None:
        super().__init__(channel)
        self._may_go_on = may_go_on

    def receive(self) -> tuple[Message, list[int]]:
        assert self._may_go_on.wait(60)
        return super().receive()

    def send(self, message: Message, files: Sequence[int] = (), while_full: Callable[[], None] = do_nothing) -> None:
        self._channel.send(message, files, while_full)


def test_a_stopped_rank_is_found_while_a_step_is_sent(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step is larger than what a socket takes of which nobody reads."""
    may_go_on = threading.Event()

    def serve(channel: Channel, join: Join, files: Sequence[int]) -> None:
        process.serve(DeafChannel(channel, may_go_on), join, files)

    device = RankedDevice(model, settings_of(2), in_threads(serve))
    monkeypatch.setattr(device._watch, "problem", lambda rank: f"rank {rank} was stopped")
    helper = threading.Timer(20, may_go_on.set)  # without the look, this is what ends the test
    helper.start()
    with pytest.raises(LostRankError, match=r"^rank 1 was stopped$"):
        device.begin(StepInput(number=1, rows=rows() * 5000))
    assert not may_go_on.is_set()
    helper.cancel()
    may_go_on.set()
    device.close()


def test_a_large_step_comes_in_parts() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        step = Step.of(StepInput(number=1, rows=rows() * 5000))
        sending = threading.Thread(target=Channel(ours).send, args=(step,))
        sending.start()
        assert Channel(theirs).receive() == (step, [])
        sending.join()


def test_heads_that_cannot_be_shared_are_named(model: Path) -> None:
    with pytest.raises(StartupError, match=r"^--tensor-parallel-size 3 does not divide 4 attention heads$"):
        RankedDevice(model, settings_of(3), in_threads())
