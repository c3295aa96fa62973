"""Models whose stages several processes compute: the same answers as one process's, and what becomes of stages that are
lost."""

from __future__ import annotations

import math
import os
import threading
from pathlib import Path

import pytest
import torch

from common.errors import LostRankError, StartupError
from common.model_files import open_model, read_safetensors_header
from common.sampling import SamplingParams
from engine.device import Device
from engine.loading.weights import load_weights
from engine.local.device import LocalDevice
from engine.models.decoder import Decoder
from engine.models.registry import build_model
from engine.models.stage import Stage
from engine.ranks.device import RankedDevice
from engine.ranks.link import SocketLink
from engine.ranks.shared_memory import exchange_library
from engine.sampling.draws import draw
from engine.step import Drawn, StepInput, StepRow
from tests.engine.ranks.devices import answers, ids, in_threads, rows, settings_of, staged
from tests.engine.tiny_models import FAMILIES, make_model

pytestmark = pytest.mark.skipif(exchange_library() is None, reason="the library was not built")

LIKELIEST = draw(SamplingParams(temperature=0.0), 0)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.usefixtures("short_parts")
def test_answers_of_a_mixture_are_those_of_one_process(tmp_path: Path, size: int) -> None:
    """`size` 2: each stage has two ranks, with some experts each."""
    path = make_model(tmp_path / "mixture", FAMILIES["qwen3_moe"])
    settings = settings_of(1)
    wanted, _ = answers(LocalDevice(path, settings), settings)
    with staged(path, 3, size, expert_parallel_size=size) as device:
        given, _ = answers(device, settings_of(size))
        dealt = ", experts dealt out" if size > 1 else ""
        assert device.kernels_name.endswith(f", {3 * size} ranks in 3 stages{dealt}")
    assert given == wanted


@pytest.mark.parametrize("num_tokens", [1, 6])
def test_every_kind_of_row(model: Path, num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.ranks.pipeline.MICRO_BATCH_TOKENS", num_tokens)
    expected = LocalDevice(model, settings_of(1)).compute(rows())
    with staged(model, 2) as device:
        device.warm_up()
        given = device.compute(rows())
        (plane,) = device.planes()
        whole = device.info.spec
        assert all(layer.count_nonzero() for layer in torch.as_tensor(plane.cache)[4].nan_to_num())
    assert ids(given.tokens) == ids(expected.tokens)
    assert [score.token_id for score in given.scores[3]] == [2, 3]
    torch.testing.assert_close(torch.tensor(given.pooled[4]), torch.tensor(expected.pooled[4]), atol=1e-4, rtol=1e-4)
    assert plane.spec == whole, "connectors see one cache of all layers"


def test_a_drafted_token_reads_what_the_step_writes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of one token are computed first, as a rule."""
    monkeypatch.setattr("engine.ranks.pipeline.MICRO_BATCH_TOKENS", 2)
    step = [
        StepRow(token_ids=[9], num_computed_tokens=5, block_ids=[4], draw=LIKELIEST),
        StepRow(token_ids=[1, 2, 3, 4, 5], num_computed_tokens=0, block_ids=[4], draw=LIKELIEST),
    ]
    expected = LocalDevice(model, settings_of(1)).execute(step)
    with staged(model, 2) as device:
        assert ids(device.execute(step)) == ids(expected)


def test_a_step_may_begin_with_a_token_that_is_still_to_be_drawn(model: Path) -> None:
    def drawn_twice(device: Device) -> list[int | None]:
        numbers = [device.next_number() for _ in range(3)]
        first = StepRow(token_ids=[5, 6, 7], num_computed_tokens=0, block_ids=[0], draw=LIKELIEST)
        drawn = Drawn(numbers[0], 0)
        second = StepRow(token_ids=[0], num_computed_tokens=3, block_ids=[0], draw=LIKELIEST, first=drawn)
        third = StepRow(token_ids=[8, 9], num_computed_tokens=0, block_ids=[1], draw=LIKELIEST)
        steps = zip(numbers, (first, second, third), strict=True)
        begun = [device.begin(StepInput(number=number, rows=[row])) for number, row in steps]
        return [token for ticket in begun for token in ids(device.end(ticket).tokens)]

    expected = drawn_twice(LocalDevice(model, settings_of(1)))
    with staged(model, 2) as device:
        assert drawn_twice(device) == expected


def test_what_stages_send_each_other(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each micro-batch the hidden states once, from each stage to the next: 64 float32 for a token."""
    monkeypatch.setattr("engine.ranks.pipeline.MICRO_BATCH_TOKENS", 10)
    sent: list[tuple[int, int]] = []
    send = SocketLink.send

    def noted(self: SocketLink, values: torch.Tensor) -> None:
        sent.append((len(values), values.nbytes))
        send(self, values)

    step = [
        StepRow(token_ids=list(range(30)), num_computed_tokens=0, block_ids=[0, 1], draw=LIKELIEST),
        StepRow(token_ids=[3], num_computed_tokens=0, block_ids=[2], draw=LIKELIEST),
    ]
    with staged(model, 3) as device:
        monkeypatch.setattr(SocketLink, "send", noted)
        device.execute(step)
        assert sorted(sent) == sorted([(10, 2560), (10, 2560), (11, 2816)] * 2)
        sent.clear()
        device.execute([step[1]])
        assert sent == [(1, 256)] * 2


def read_bytes(path: Path, num_stages: int) -> list[int]:
    read = []
    for number in range(num_stages):
        model = build_model(
            open_model(path),
            num_positions=64,
            dtype=torch.float32,
            device=torch.device("cpu"),
            stage=Stage(number, num_stages),
        )
        assert isinstance(model, Decoder)
        num_bytes = load_weights(open_model(path), model.places(), may_skip=lambda _: True)
        assert num_bytes is not None
        read.append(num_bytes)
    return read


@pytest.mark.parametrize("is_tied", [False, True])
def test_a_stage_reads_no_more_than_its_layers(tmp_path: Path, is_tied: bool) -> None:
    flags = {"num_hidden_layers": 5, "vocab_size": 500, "tie_word_embeddings": is_tied}
    path = make_model(tmp_path / "model", flags)
    header, _ = read_safetensors_header(open_model(path).weight_files[0])
    sizes = {name: 4 * math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    embedding = sizes["model.embed_tokens.weight"]
    layer = sum(size for name, size in sizes.items() if name.startswith("model.layers.0."))
    norm = sizes["model.norm.weight"]
    assert read_bytes(path, 2) == [embedding + 3 * layer, 2 * layer + norm + embedding]
    assert read_bytes(path, 3) == [embedding + 2 * layer, 2 * layer, layer + norm + embedding]
    assert sum(read_bytes(path, 4)) == sum(sizes.values()) + (embedding if is_tied else 0)


def test_a_stage_refuses_tensors_that_no_stage_knows(model: Path, tmp_path: Path) -> None:
    path = make_model(tmp_path / "model", {"num_hidden_layers": 2, "attention_bias": True})
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(text.replace('"attention_bias": true', '"attention_bias": false'))
    for number in (0, 1):
        one = build_model(
            open_model(path),
            num_positions=64,
            dtype=torch.float32,
            device=torch.device("cpu"),
            stage=Stage(number, 2),
        )
        with pytest.raises(StartupError, match=rf"model.layers.{number}.self_attn.\w+.bias, which this architecture"):
            one.load(open_model(path), None)


def test_models_that_have_no_such_stages_are_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"--pipeline-parallel-size 6 leaves a stage without any of 5 layers$"):
        RankedDevice(model, settings_of(1, pipeline_parallel_size=6), in_threads())
    other = make_model(tmp_path / "neox", {"model_type": "gpt_neox", "tie_word_embeddings": False})
    with pytest.raises(StartupError, match=r"-size 2: model type gpt_neox runs on transformers' code, which has no st"):
        RankedDevice(other, settings_of(1, pipeline_parallel_size=2), in_threads())


@pytest.mark.parametrize("victim", [1, 2])
def test_a_stage_that_fails_in_a_step_is_named(model: Path, victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one, or one between: rank 0 waits for the other, which waits, too."""
    with staged(model, 3) as device:
        compute = LocalDevice._compute
        number = {1: 1, 2: 0}[victim]  # of the stage

        def failing(self: LocalDevice, *arguments: object) -> object:
            if self._pipeline.stage.number == number:
                raise ArithmeticError("a defect")
            return compute(self, *arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(LocalDevice, "_compute", failing)
        with pytest.raises(LostRankError, match=rf"^rank {victim}: ArithmeticError: a defect$"):
            device.compute(rows())


def sockets() -> int:
    links = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return sum(os.path.islink(link) and os.readlink(link).startswith("socket:") for link in links)


def test_no_socket_and_no_thread_is_left(model: Path) -> None:
    before = sockets()
    with staged(model, 2, 2) as device:
        device.execute(rows()[:1])
        assert sockets() > before
    assert sockets() == before
    assert not any(thread.name == "hidden states" for thread in threading.enumerate())
