"""Recorded decode steps give what the same steps give, and write where they write.

The recorder here calls the function again, and fails if a graph would have done something else: if the function
launches other kernels than when it was recorded, gives them other numbers, or has them read memory that has moved
since. So all but the recording is tested: which size a step takes, padding, and that every input lies where the graph
reads it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.config import EngineSettings
from common.sampling import SamplingParams
from engine.attention import flashinfer_cascade
from engine.attention.base import AttentionShape
from engine.attention.flashinfer import FlashInferBackend
from engine.attention.shared_prefixes import SharedPrefixes
from engine.layers import Linear
from engine.local.device import LocalDevice
from engine.local.graphs import DecodeGraphs, Replay, graph_sizes
from engine.models.base import CausalLM
from engine.models.decoder import Decoder
from engine.sampling.draws import draw
from engine.step import Scoring, StepRow
from tests.engine.fake_flashinfer import FakeDecodeWrapper, FakePrefillWrapper, fake_flashinfer
from tests.engine.tiny_models import FAMILIES, VOCAB_SIZE, full_logprobs, make_model

NUM_BLOCKS = 40
SIZES = [1, 2, 4, 7]
GREEDY = SamplingParams(temperature=0.0)
UNLIKE = (
    GREEDY,
    SamplingParams(temperature=0.0, logprobs=3),
    SamplingParams(temperature=0.9, seed=4, top_p=0.9),
    SamplingParams(temperature=0.0, allowed_token_ids=(5, 6)),
)


class Launches(TorchDispatchMode):
    """What a graph of the kernels launched meanwhile would consist of: which ones, the numbers and shapes that they are
    given, and the address of what they read that none of them has made."""

    def __init__(self) -> None:
        super().__init__()
        self.launched: list[tuple[object, ...]] = []
        self._made: dict[int, torch.Tensor] = {}  # by address; kept, so that nothing else gets the address
        self._is_in_kernel = False

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        return self.launch(str(func), (args, kwargs or {}), lambda: func(*args, **(kwargs or {})))

    def launch(self, name: str, given: object, kernel: Callable[[], object]) -> object:
        """`kernel` counts as one, whatever it calls."""
        if self._is_in_kernel:
            return kernel()
        self._is_in_kernel = True
        try:
            out = kernel()
        finally:
            self._is_in_kernel = False
        read = set()
        facts: list[object] = [name]
        for one in leaves(given):
            if not isinstance(one, torch.Tensor):
                facts.append(one)
                continue
            read.add(one.untyped_storage().data_ptr())
            facts.append((tuple(one.shape), None if one.untyped_storage().data_ptr() in self._made else one.data_ptr()))
        self.launched.append(tuple(facts))
        for one in leaves(out):
            if isinstance(one, torch.Tensor) and (address := one.untyped_storage().data_ptr()) not in read:
                self._made[address] = one
        return out


def leaves(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        value = list(value.items())
    if not isinstance(value, list | tuple):
        yield value
        return
    for one in value:
        yield from leaves(one)


class Recorder:
    """Stands for CUDA graphs, which share their memory: each replay overwrites the results of all others."""

    def __init__(self) -> None:
        self.replayed = 0
        self.launches: Launches | None = None  # of the function that runs
        self._outputs: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, compute: Replay) -> Replay:
        outputs, recorded = self._run(compute)
        self._outputs.append(outputs)

        def replay() -> tuple[torch.Tensor, torch.Tensor]:
            self.replayed += 1
            (logits, best), launched = self._run(compute)
            assert len(launched) == len(recorded)
            for now, then in zip(launched, recorded, strict=True):
                assert now == then, "a graph does what was done when it was recorded"
            for other_logits, other_best in self._outputs:
                other_logits.fill_(float("nan"))
                other_best.fill_(-1)
            outputs[0].copy_(logits)
            outputs[1].copy_(best)
            return outputs

        return replay

    def _run(self, compute: Replay) -> tuple[tuple[torch.Tensor, torch.Tensor], list[tuple[object, ...]]]:
        with Launches() as self.launches:
            outputs = compute()
        launched, self.launches = self.launches.launched, None
        return outputs, launched


@pytest.fixture(scope="module", params=["llama", pytest.param("gemma2", marks=pytest.mark.slow), "qwen3_moe"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / request.param, FAMILIES[request.param])


@pytest.fixture
def make_device(path: Path, monkeypatch: pytest.MonkeyPatch) -> type[LocalDevice]:
    fake_flashinfer(monkeypatch)
    monkeypatch.setattr(flashinfer_cascade, "MIN_SAVED_BYTES", 1)
    recorders: list[Recorder] = []

    def as_one_kernel(wrapper_type: type[FakeDecodeWrapper] | type[FakePrefillWrapper]) -> None:
        run: Callable[..., object] = wrapper_type.run

        def run_as_one_kernel(
            wrapper: FakeDecodeWrapper | FakePrefillWrapper, q: torch.Tensor, cache: torch.Tensor, **options: object
        ) -> object:
            launches = recorders[-1].launches if recorders else None
            if launches is None:
                return run(wrapper, q, cache, **options)
            given = ("attend", q, cache, wrapper.fixed)
            return launches.launch("attend", given, lambda: run(wrapper, q, cache, **options))

        monkeypatch.setattr(wrapper_type, "run", run_as_one_kernel)

    as_one_kernel(FakeDecodeWrapper)
    as_one_kernel(FakePrefillWrapper)

    class Device(LocalDevice):
        """A model on the CPU with FlashInfer's tables, and a block more than it tells of."""

        def __init__(self, *, cascade: bool = False) -> None:
            given = {"device": "cpu", "dtype": "float32", "num_blocks": NUM_BLOCKS, "kernels": "torch"}
            super().__init__(path, EngineSettings.model_validate(given), raises=True)
            model, spec = self._model, self.info.spec
            self.blocks = torch.full((NUM_BLOCKS + 1, *spec.block_shape), float("nan"))
            shape = AttentionShape(
                num_heads=model.num_heads,
                softmax_scale=model.softmax_scale,
                windows=model.windows,
                soft_cap=model.soft_cap,
            )
            self._attention = FlashInferBackend(self.blocks, spec, shape, cascade=cascade)
            self.recorder = Recorder()
            multiply_experts_as_on_a_device(model)

        def record(self) -> None:
            recorders.append(self.recorder)
            with torch.inference_mode():
                self._graphs = DecodeGraphs(
                    self._model, self._attention, spare_block=NUM_BLOCKS, sizes=SIZES, recorder=self.recorder
                )

    return Device


def multiply_experts_as_on_a_device(model: CausalLM) -> None:
    """All of a layer in one call, and not one by one, as on a CPU."""
    assert isinstance(model, Decoder)
    for layer in model.layers:
        if layer.experts is not None:
            mlps = layer.experts.mlps
            gate_up = stacked(mlps.gate_ups, model.hidden_size)
            mlps._stacks = gate_up, stacked(mlps.downs, gate_up.shape[1] // 2)


def stacked(linears: Sequence[Linear], in_features: int) -> torch.Tensor:
    """Their weights, `[len(linears), out_features, in_features]`."""
    return torch.stack([linear(torch.eye(in_features)).T for linear in linears])


def prompts(rng: random.Random) -> list[tuple[list[int], list[int]]]:
    """Tokens and block tables of sequences of several lengths."""
    free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    lengths = (3, 15, 16, 31, 40, 50, 17)
    return [
        ([rng.randrange(3, VOCAB_SIZE) for _ in range(n)], [free.pop() for _ in range(-(-(n + 9) // 16))])
        for n in lengths
    ]


def test_graphs_give_what_steps_give(make_device: type[LocalDevice]) -> None:
    devices = [make_device(), make_device()]
    eager, graphed = devices
    graphed.record()  # type: ignore[attr-defined]
    sequences = prompts(random.Random(3))
    chunks = [StepRow(token_ids=ids, num_computed_tokens=0, block_ids=table) for ids, table in sequences]
    for device in devices:
        device.execute(chunks)
    assert graphed.recorder.replayed == 0  # type: ignore[attr-defined]
    for index, count in enumerate((7, 6, 5, 4, 2, 1)):
        rows = [
            StepRow(
                token_ids=[5 + index],
                num_computed_tokens=len(ids) + index,
                block_ids=table,
                draw=draw(SamplingParams(temperature=0.0, logprobs=VOCAB_SIZE), index),
            )
            for ids, table in sequences[:count]
        ]
        for ours, expected in zip(graphed.execute(rows), eager.execute(rows), strict=True):
            assert ours is not None
            assert expected is not None
            torch.testing.assert_close(full_logprobs(ours, VOCAB_SIZE), full_logprobs(expected, VOCAB_SIZE))
    assert graphed.recorder.replayed == 6  # type: ignore[attr-defined]
    written, wanted = (device.blocks[:NUM_BLOCKS] for device in devices)  # type: ignore[attr-defined]
    torch.testing.assert_close(written, wanted, equal_nan=True)
    assert wanted.isnan().any()
    assert eager.blocks[NUM_BLOCKS].isnan().all()  # type: ignore[attr-defined]
    padding = graphed.blocks[NUM_BLOCKS].isnan()  # type: ignore[attr-defined]
    assert not padding[..., 0, :].any()  # where token 0 of the spare block is
    assert padding[..., 1:, :].all()


def test_graphs_of_rows_that_share_give_what_steps_give(make_device: type[LocalDevice]) -> None:
    """Steps that share, and others between them, whose graphs take turns in the same memory."""
    eager, graphed = make_device(), make_device(cascade=True)  # type: ignore[call-arg]
    graphed.record()  # type: ignore[attr-defined]
    graphs = graphed._graphs
    assert graphs is not None
    assert sorted(graphs._cascades) == [2, 4, 7]
    rng = random.Random(5)
    blocks = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    prefix, other = blocks[:2], blocks[2:3]
    shared, alone = [rng.randrange(3, VOCAB_SIZE) for _ in range(32)], [rng.randrange(3, VOCAB_SIZE) for _ in range(16)]
    sequences = [
        (shared, [*prefix, *blocks[4:6]]),
        (alone, [*other, *blocks[6:8]]),
        (shared, [*prefix, *blocks[8:10]]),
        ([7, 8, 9], blocks[10:12]),
        (shared, [*prefix, *blocks[12:14]]),
        (alone, [*other, *blocks[14:16]]),
    ]
    prompts_ = [StepRow(token_ids=ids, num_computed_tokens=0, block_ids=table) for ids, table in sequences[:4]]
    for device in (eager, graphed):
        device.execute([prompts_[0], prompts_[1], prompts_[3]])
    taken: list[bool] = []
    find = graphed._attention.shared_prefixes

    def count(rows: Sequence[StepRow]) -> SharedPrefixes | None:
        found = find(rows)
        taken.append(found is not None)
        return found

    graphed._attention.shared_prefixes = count  # type: ignore[method-assign,assignment]
    done = [len(ids) for ids, _ in sequences]
    wanted = draw(SamplingParams(temperature=0.0, logprobs=VOCAB_SIZE), 0)
    for step, members in enumerate(
        ([0, 1, 2, 3, 4, 5], [1, 0, 3], [3, 2, 0], [5, 4, 1, 2], [3], [0, 2], [2, 5, 3, 4, 1, 0])
    ):
        rows = [
            StepRow(
                token_ids=[5 + step + 9 * index],
                num_computed_tokens=done[index],
                block_ids=sequences[index][1],
                draw=None if index == 4 and step == 3 else wanted,
            )
            for index in members
        ]
        for index in members:
            done[index] += 1
        for ours, expected in zip(graphed.execute(rows), eager.execute(rows), strict=True):
            assert (ours is None) == (expected is None)
            if ours is not None and expected is not None:
                torch.testing.assert_close(full_logprobs(ours, VOCAB_SIZE), full_logprobs(expected, VOCAB_SIZE))
    assert taken == [True, False, True, True, False, True, True]
    assert graphed.recorder.replayed == 7  # type: ignore[attr-defined]
    written, expected_blocks = (device.blocks[:NUM_BLOCKS] for device in (graphed, eager))  # type: ignore[attr-defined]
    torch.testing.assert_close(written, expected_blocks, equal_nan=True)


def test_every_kind_of_draw(make_device: type[LocalDevice]) -> None:
    eager, graphed = make_device(), make_device()
    graphed.record()  # type: ignore[attr-defined]
    ids, table = prompts(random.Random(1))[4]
    for params in (*((each,) * 3 for each in UNLIKE), UNLIKE):
        rows = [
            StepRow(token_ids=[7 + row], num_computed_tokens=len(ids), block_ids=[table[row]] * 9, draw=draw(one, 0))
            for row, one in enumerate(params)
        ]
        rows.insert(1, StepRow(token_ids=[9], num_computed_tokens=3, block_ids=[39]))  # draws nothing
        for device in (eager, graphed):
            device.blocks.zero_()  # type: ignore[attr-defined]
        tokens, expected = graphed.execute(rows), eager.execute(rows)
        assert tokens[1] is expected[1] is None
        for one, other in zip(tokens, expected, strict=True):
            assert (one and one.token_id) == (other and other.token_id)
            assert len(one.top_logprobs if one else ()) == len(other.top_logprobs if other else ())
    assert graphed.recorder.replayed == 5  # type: ignore[attr-defined]


def test_what_a_graph_takes(make_device: type[LocalDevice]) -> None:
    device = make_device()
    device.record()  # type: ignore[attr-defined]
    graphs = device._graphs
    assert graphs is not None
    single = StepRow(token_ids=[1], num_computed_tokens=4, block_ids=[0], draw=draw(GREEDY, 0))
    assert [graphs.takes([single] * count) for count in (0, 1, 7, 8)] == [False, True, True, False]
    assert [graphs.size_for(count) for count in range(1, 8)] == [1, 2, 4, 4, 7, 7, 7]
    for other in (
        StepRow(token_ids=[1, 2], num_computed_tokens=4, block_ids=[0]),
        StepRow(token_ids=[1], num_computed_tokens=4, block_ids=[0], num_pooled=1),
        StepRow(token_ids=[1], num_computed_tokens=4, block_ids=[0], score=Scoring(start=0, token_ids=[2], num_top=0)),
    ):
        assert not graphs.takes([single, other])


@pytest.mark.parametrize(
    "forward",
    [
        lambda states, step: states[:step],
        lambda states, step: states * step,
        lambda states, step: states.clone() + (states if step == 1 else states.clone()),
        lambda states, step: torch.ones(2, 3) if step == 1 else torch.zeros(2, 3),
    ],
    ids=["another size", "another number", "another place", "another kernel"],
)
def test_what_a_graph_cannot_repeat_is_noticed(forward: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
    step, states = 1, torch.ones(2, 3)

    def compute() -> tuple[torch.Tensor, torch.Tensor]:
        out = forward(states, step)
        return out, out.argmax(-1)

    replay = Recorder()(compute)
    replay()
    step = 2
    with pytest.raises(AssertionError):
        replay()


@pytest.mark.parametrize("largest", [1, 2, 3, 8, 9, 64, 100, 256, 1000])
def test_sizes(largest: int) -> None:
    sizes = graph_sizes(largest)
    assert sizes[-1] == largest
    assert sizes == sorted(set(sizes))
    steps = [(low, high) for low, high in pairwise(sizes) if low >= 8]
    assert all(high - low <= max(8, low / 8) for low, high in steps)
