"""A step waits for its device once: from the start of the forward pass on, nothing but its results comes to the host.

The device is `meta`, whose tensors have shapes and no numbers: what asks for a number, or comes to the host, raises.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from common.model_files import open_model
from common.sampling import SamplingParams, TokenSequence
from common.types import KVCacheSpec
from engine.attention.base import AttentionShape
from engine.attention.flashinfer import FlashInferBackend
from engine.device import DeviceInfo
from engine.device_copies import read, to_device
from engine.local.device import LocalDevice
from engine.local.vocabulary import Padding
from engine.models import grouped_product
from engine.models.grouped_product import Groups
from engine.models.registry import build_model
from engine.models.stage import Stage
from engine.ranks.group import OneRank
from engine.ranks.pipeline import Pipeline
from engine.sampling.draws import draw
from engine.sampling.logit_changes import LogitChanges
from engine.sampling.sampler import mask_logits
from engine.step import Draw, Scoring, StepRow
from tests.engine.tiny_models import FAMILIES, make_model

DEVICE = torch.device("meta")


class Copies(TorchDispatchMode):
    """Counts copies from the host that do not say that nobody waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default:
            source, target = args[0].device.type, out.device.type
            is_async = kwargs.get("non_blocking", False)
        elif func is torch.ops.aten.copy_.default:
            source, target = args[1].device.type, args[0].device.type
            is_async = len(args) > 2 and args[2]
        else:
            return out
        if source != target and not is_async:
            self.waiting.append(f"{func} {tuple(out.shape)} from {source} to {target}")
        return out


@contextmanager
def on_the_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Copies, list[int]]]:
    """What waited, and how many numbers each `read` brought; they are all 1 here."""
    reads: list[int] = []

    def fake_read(tensors: Sequence[torch.Tensor]) -> list[list[float]]:
        reads.append(sum(tensor.numel() for tensor in tensors))
        return [[float(tensor.dtype != torch.bool)] * tensor.numel() for tensor in tensors]

    for name in ("sampling.sampler", "local.device", "local.scores"):
        monkeypatch.setattr(f"engine.{name}.read", fake_read)
    with Copies() as copies:
        yield copies, reads


def test_such_a_device_notices_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_the_device(monkeypatch) as (copies, _):
        there = torch.zeros(3, device=DEVICE)
        for ask in (
            there.tolist,
            there.cpu,
            lambda: bool(there.any()),
            lambda: int(there[0]),
            lambda: there[there > 0],
        ):
            with pytest.raises((NotImplementedError, RuntimeError), match=r"(?i)meta"):
                ask()
        with pytest.raises((NotImplementedError, RuntimeError), match=r"(?i)meta"):
            there.long().bincount()
        to_device([1, 2], DEVICE)
        assert copies.waiting == []
        torch.zeros(2).to(DEVICE)
        assert len(copies.waiting) == 1


def test_one_read_brings_all() -> None:
    ids, probs, flags = torch.tensor([1 << 40, 3]), torch.tensor([[0.1], [-1e-30]]), torch.tensor([True, False, True])
    assert read([ids, probs, flags]) == [[1 << 40, 3], probs.flatten().tolist(), [1, 0, 1]]
    assert read([ids]) == [[1 << 40, 3]]


EVERYTHING = {
    "greedy": SamplingParams(temperature=0.0),
    "logprobs": SamplingParams(temperature=0.0, logprobs=3),
    "drawn": SamplingParams(temperature=0.8, seed=1),
    "top-k": SamplingParams(top_k=5, logprobs=0),
    "top-p": SamplingParams(top_p=0.5, min_p=0.1),
    "both": SamplingParams(top_k=9, top_p=0.5),
    "penalties": SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.1),
    "bias": SamplingParams(logit_bias={3: 1.0, 4: -2.0}),
    "allowed": SamplingParams(allowed_token_ids=(5, 6, 7)),
    "banned": SamplingParams(min_tokens=5, stop_token_ids=(1,), bad_words_ids=(TokenSequence(token_ids=(9,)),)),
}


def asking(params: SamplingParams) -> Draw:
    changes = LogitChanges(params, [3, 4, 5], [2]) if params.changes_logits else None
    return draw(params=params, num_output_tokens=0, changes=changes)


class OnDevice(LocalDevice):
    """A runner of a model without weights, on the device."""

    def __init__(self, path: Path, *, cascade: bool = False) -> None:
        self.device, self._kernels, self._padding, self._raises = DEVICE, None, Padding((), 0, DEVICE), True
        self._group = OneRank()
        self._pipeline, self._data_ranks = Pipeline(Stage(), everybody=self._group), None
        model = build_model(open_model(path), num_positions=256, dtype=torch.bfloat16, device=DEVICE)
        model.finish(None)
        self._model = model
        spec = KVCacheSpec(
            model_id="m",
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            block_size=16,
            dtype="bfloat16",
        )
        cache = torch.empty((40, *spec.block_shape), dtype=torch.bfloat16, device=DEVICE)
        shape = AttentionShape(
            num_heads=model.num_heads, softmax_scale=1.0, windows=model.windows, soft_cap=model.soft_cap
        )
        self._attention = FlashInferBackend(cache, spec, shape, cascade=cascade)
        self.info = DeviceInfo(
            spec=spec,
            num_blocks=40,
            max_model_len=256,
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            eos_token_ids=(),
            dtype_reason="",
            device=str(DEVICE),
            device_reason="",
            free_rows=1.0,
        )
        self._graphs = self._states = None
        self._begun, self._drawn = {}, deque()


MERGED: list[int] = []  # rows whose shared blocks were read, by layer


class Planned:
    """FlashInfer's wrappers, for shapes: `plan` is given tables, `run` gives what is like the queries."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def plan(self, *_: object, **__: object) -> None: ...

    def run(self, q: torch.Tensor, _: torch.Tensor, *, return_lse: bool = False) -> object:
        out = torch.empty_like(q)
        return (out, torch.empty(q.shape[:2], device=q.device)) if return_lse else out


@pytest.fixture
def _planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def merge(v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor, mask: object) -> None:
        assert v.shape == v_other.shape
        assert s.shape == s_other.shape
        assert mask is None
        MERGED.append(len(v))

    monkeypatch.setattr("engine.attention.flashinfer_cascade.MIN_SAVED_BYTES", 1)
    MERGED.clear()
    fake = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=Planned,
        BatchPrefillWithPagedKVCacheWrapper=Planned,
        merge_state_in_place=merge,
    )
    monkeypatch.setattr("engine.attention.flashinfer.import_flashinfer", lambda: fake)


def steps() -> dict[str, list[StepRow]]:
    """By name, what requests ask for at once."""

    def sequence(sample: Draw | None, num_new: int = 1, **fields: object) -> StepRow:
        return StepRow(
            token_ids=[7] * num_new,
            num_computed_tokens=30,
            block_ids=range(5),
            draw=sample,
            **fields,  # type: ignore[arg-type]
        )

    every = [sequence(asking(params)) for params in EVERYTHING.values()]
    return {
        "greedy": [sequence(asking(EVERYTHING["greedy"]))] * 4,
        "everything": every,
        "and a prompt": [*every, sequence(asking(EVERYTHING["greedy"]), 20), sequence(None, 5)],
        **{name: [sequence(asking(params))] for name, params in EVERYTHING.items()},
    }


@pytest.mark.usefixtures("_planned")
@pytest.mark.parametrize(
    ("has_grouped_mm", "family"),
    [
        (True, "llama"),
        (True, "qwen3_moe"),  # experts
        pytest.param(True, "gemma2", marks=pytest.mark.slow),
        *(pytest.param(has, "mixtral", marks=pytest.mark.slow) for has in (True, False)),
        pytest.param(False, "qwen3_moe", marks=pytest.mark.slow),
    ],
)
def test_a_step_waits_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, has_grouped_mm: bool) -> None:
    path = make_model(tmp_path / family, FAMILIES[family])
    monkeypatch.setattr(grouped_product, "has_grouped_mm", lambda _: has_grouped_mm)
    with on_the_device(monkeypatch) as (copies, reads):
        for cascade in (False, True):
            runner = OnDevice(path, cascade=cascade)
            copies.waiting.clear()
            for name, step in steps().items():
                reads.clear()
                tokens = runner.execute(step)
                assert copies.waiting == [], name
                assert len(reads) == 1, name
                assert all((token is None) == (one.draw is None) for token, one in zip(tokens, step, strict=True)), name
            assert bool(MERGED) == (cascade and 0 in (runner._model.windows or [0]))


@pytest.mark.usefixtures("_planned")
def test_scores_and_pooled_states_come_in_one_copy_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_model(tmp_path / "llama", {})
    with on_the_device(monkeypatch) as (copies, reads):
        runner = OnDevice(path)
        copies.waiting.clear()
        score = Scoring(start=0, token_ids=[3, 4, 5], num_top=2)
        sequence = {"token_ids": [7] * 6, "num_computed_tokens": 0, "block_ids": range(5)}
        output = runner.compute([StepRow(**sequence, score=score)])
        assert [len(one.top_logprobs) for one in output.scores[0]] == [2, 2, 2]
        assert reads == [3 + 6 + 6]
        reads.clear()
        runner.execute([StepRow(**sequence, num_pooled=6), StepRow(**sequence, num_pooled=1)])
        assert reads == [2 * 64]
        assert copies.waiting == []


def test_masks_of_grammars_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_the_device(monkeypatch) as (copies, _):
        logits = torch.zeros(4, 60, device=DEVICE)
        mask_logits(logits, [1, 3], torch.zeros(2, 8, dtype=torch.uint8))
        assert copies.waiting == []


@pytest.mark.parametrize(("num_rows", "num_groups"), [(1, 4), (7, 3), (64, 5), (300, 8), (1000, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_by_groups(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, num_groups: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    x = torch.randn(num_rows, 24, generator=generator).to(dtype)
    weights = torch.randn(num_groups, 16, 24, generator=generator).to(dtype)
    for used in (range(num_groups), [0], [num_groups - 1], range(1, num_groups, 2)):
        choices = torch.tensor(list(used))
        group = choices[torch.randint(len(choices), (num_rows,), generator=generator)].sort().values
        expected = torch.stack([row @ weights[number].T for row, number in zip(x, group, strict=True)])
        for is_there in (True, False):
            monkeypatch.setattr(grouped_product, "has_grouped_mm", lambda _, is_there=is_there: is_there)
            for at_once in (1, 1 << 30):
                result = Groups(group, num_groups, at_once).multiply(x, weights)
                assert result.dtype == dtype
                torch.testing.assert_close(result, expected, atol=0.05 if dtype == torch.bfloat16 else 1e-4, rtol=1e-2)
