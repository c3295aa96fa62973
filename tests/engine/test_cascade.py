"""Steps whose rows share blocks: the same results as without sharing, and fewer blocks read."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from common.config import EngineSettings
from engine.attention import flashinfer_cascade
from engine.attention.base import AttentionBackend, AttentionShape
from engine.attention.flashinfer import FlashInferBackend
from engine.attention.registry import attention_backend
from engine.local.device import LocalDevice
from engine.step import StepRow
from tests.engine import fake_flashinfer as fakes
from tests.engine.fake_flashinfer import FakeDecodeWrapper, FakePrefillWrapper, fake_flashinfer
from tests.engine.test_model_attention import NUM_BLOCKS, SHAPE, SHAPES, SPEC, each_shape, make_backend
from tests.engine.tiny_models import FAMILIES, make_model

SIZE = SPEC.block_size


class Plans:
    """What the wrappers were asked to read: blocks by row, and of groups also the rows and tokens in last blocks."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decodes: list[list[list[int]]] = []
        self.chunks: list[list[list[int]]] = []
        self.shared: list[tuple[list[int], list[list[int]], list[int]]] = []
        self.num_merged = 0
        plan_decode, plan_prefill = FakeDecodeWrapper.plan, FakePrefillWrapper.plan
        merge = fakes.fake_merge_state_in_place

        def keep_decode(wrapper: FakeDecodeWrapper, indptr: torch.Tensor, indices: torch.Tensor, *rest, **options):  # type: ignore[no-untyped-def]
            self.decodes.append(cut(indices, indptr))
            plan_decode(wrapper, indptr, indices, *rest, **options)

        def keep_prefill(  # type: ignore[no-untyped-def]
            wrapper: FakePrefillWrapper,
            rows: torch.Tensor,
            indptr: torch.Tensor,
            indices: torch.Tensor,
            last: torch.Tensor,
            *rest,
            **options,
        ):
            if options["causal"]:
                self.chunks.append(cut(indices, indptr))
            else:
                self.shared.append((rows.tolist(), cut(indices, indptr), last.tolist()))
            plan_prefill(wrapper, rows, indptr, indices, last, *rest, **options)

        def count(*states: torch.Tensor | None) -> None:
            self.num_merged += 1
            merge(*states)  # type: ignore[arg-type]

        monkeypatch.setattr(FakeDecodeWrapper, "plan", keep_decode)
        monkeypatch.setattr(FakePrefillWrapper, "plan", keep_prefill)
        monkeypatch.setattr(fakes, "fake_merge_state_in_place", count)
        fake_flashinfer(monkeypatch)
        monkeypatch.setattr(flashinfer_cascade, "MIN_SAVED_BYTES", 1)


def cut(indices: torch.Tensor, indptr: torch.Tensor) -> list[list[int]]:
    ends = indptr.tolist()
    return [indices[start:end].tolist() for start, end in pairwise(ends)]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Plans:
    return Plans(monkeypatch)


def cascade(shape: AttentionShape = SHAPE) -> FlashInferBackend:
    cache = torch.full((NUM_BLOCKS, *SPEC.block_shape), float("nan"))
    return FlashInferBackend(cache, SPEC, shape, cascade=True)


def row(table: Sequence[int], before: int, num_new: int = 1) -> StepRow:
    return StepRow(token_ids=[0] * num_new, num_computed_tokens=before, block_ids=list(table))


@each_shape
@pytest.mark.parametrize("seed", [0, 1])
def test_mixed_steps_give_what_the_formula_gives(plans: Plans, shape: AttentionShape, seed: int) -> None:
    """Decodes of two prefixes and of none, chunks between them, in any order; all layers."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    ours, reference = cascade(shape), make_backend("reference", shape)
    free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    prefixes = [[free.pop() for _ in range(count)] for count in (5, 3)]
    # By sequence: its blocks, and how many of its tokens are computed. A prefix is computed by its first sequence.
    tables = [prefixes[kind] + [free.pop() for _ in range(6)] for kind in (0, 0, 0, 1, 1, 0)]
    tables += [[free.pop() for _ in range(6)] for _ in range(2)]
    done = [0] * len(tables)

    def compute(sizes: dict[int, int]) -> None:
        step = [row(tables[index], done[index], size) for index, size in sizes.items()]
        num_tokens = sum(sizes.values())
        prepared = [backend.prepare(step) for backend in (ours, reference)]
        for layer in range(SPEC.num_layers):
            planes = (SPEC.num_planes, SPEC.num_kv_heads)
            qkv = torch.randn(num_tokens, shape.num_heads + math.prod(planes), SPEC.head_dim, generator=generator)
            q, kv = qkv[:, : shape.num_heads], qkv[:, shape.num_heads :].view(num_tokens, *planes, SPEC.head_dim)
            given, expected = (each.forward(layer, q, kv) for each in prepared)
            torch.testing.assert_close(given, expected, atol=1e-5, rtol=1e-5)
        for index, size in sizes.items():
            done[index] += size

    compute({0: 5 * SIZE, 3: 3 * SIZE, 6: 7, 7: 2})
    done[1], done[2], done[5], done[4] = 5 * SIZE, 5 * SIZE, 5 * SIZE, 3 * SIZE
    for number in range(6):
        order = rng.sample(range(len(tables)), len(tables))
        compute({index: 3 if index == 5 and number < 3 else 1 for index in order})
    torch.testing.assert_close(ours.cache, reference.cache, equal_nan=True, atol=0, rtol=0)
    full_layers = [shape.window(layer) for layer in range(SPEC.num_layers)].count(0)
    assert plans.num_merged == 6 * full_layers, "each layer that sees all, in each step with decodes that share"
    assert len(plans.shared) == (6 if full_layers else 0)


def test_what_is_read(plans: Plans) -> None:
    """The chunk reads its own whole table, although it begins with the same blocks."""
    prefix = [40, 41, 42]
    steps = [
        row([*prefix, 1], 12),
        row([7], 2),
        row([*prefix, 2], 12, 3),
        row([*prefix, 3, 4], 17),
        row([50, 51], 4),
        row([50, 52], 7),
        row([*prefix, 5], 15),
    ]
    cascade().prepare(steps)
    assert plans.shared == [([0, 3, 5], [prefix, [50]], [SIZE, SIZE])]
    assert plans.decodes == [[[1], [3, 4], [5], [51], [52], [7]]]
    assert plans.chunks == [[[*prefix, 2]]]


def test_layers_with_a_window_read_as_ever(plans: Plans) -> None:
    steps = [row([40, 41, 42, number], 13) for number in range(3)]
    cascade(replace(SHAPE, windows=(0, 6))).prepare(steps)
    assert plans.shared == [([0, 3], [[40, 41, 42]], [SIZE])]
    assert plans.decodes == [[[0], [1], [2]], [[42, 0], [42, 1], [42, 2]]]


@pytest.mark.parametrize(
    ("shape", "steps"),
    [
        (SHAPES["one window"], [row([40, 41, 42, number], 13) for number in range(3)]),
        (SHAPE, [row([number, 41, 42], 9) for number in range(3)]),
        (SHAPE, [row([40, 41, 42, number], 12, 2) for number in range(3)]),
        (SHAPE, [row([40, 41], 5)]),
    ],
    ids=["windows in all layers", "nothing in common", "chunks alone", "one row"],
)
def test_what_is_not_shared(plans: Plans, shape: AttentionShape, steps: list[StepRow]) -> None:
    cascade(shape).prepare(steps)
    assert not plans.shared


def test_what_saves_too_little_is_read_row_by_row(plans: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [row([40, 41, number], 9) for number in range(3)]
    saved = 2 * 2 * SIZE * 2 * SPEC.num_kv_heads * SPEC.head_dim * 4  # two rows' two blocks, K and V in float32
    for most, num_plans in ((saved, 1), (saved + 1, 1), (0, 2)):
        monkeypatch.setattr(flashinfer_cascade, "MIN_SAVED_BYTES", most)
        cascade().prepare(steps)
        assert len(plans.shared) == num_plans


def test_nothing_is_shared_unless_asked_for(plans: Plans) -> None:
    cache = torch.zeros(NUM_BLOCKS, *SPEC.block_shape)
    backend = FlashInferBackend(cache, SPEC, SHAPE)
    steps = [row([40, 41, number], 9) for number in range(3)]
    backend.prepare(steps)
    assert not plans.shared
    assert backend.shared_prefixes(steps) is None
    assert cascade().shared_prefixes(steps) is not None


def test_a_graph_plans_anew_only_if_something_else_is_shared(plans: Plans) -> None:
    """Groups that a step lacks have no rows; the mask tells which rows to merge."""
    backend = cascade()
    fixed = backend.fixed_cascade(4)
    padding = row([0], 0)
    fixed.fill([padding] * 4)
    assert plans.shared == [([0, 4, 4], [[0], []], [SIZE, SIZE])]
    steps = [row([40, 41, number], 8) for number in (1, 2, 3)]
    for further in range(3):
        moved = [replace(each, num_computed_tokens=8 + further) for each in steps]
        shared = backend.shared_prefixes(moved)
        assert shared is not None
        fixed.fill([*moved, padding], shared)
        fixed.begin()
        assert fixed._is_sharing.tolist() == [True] * 3 + [False]  # type: ignore[attr-defined]
    assert plans.shared[1:] == [([0, 3, 3], [[40, 41], []], [SIZE, SIZE])]
    pair = steps[:2]
    shared = backend.shared_prefixes(pair)
    assert shared is not None
    fixed.fill([*pair, padding, padding], shared)
    assert plans.shared[2:] == [([0, 2, 2], [[40, 41], []], [SIZE, SIZE])]


@pytest.mark.parametrize(("given", "expected"), [({}, False), ({"cascade_attention": "auto"}, True)])
def test_the_setting_reaches_the_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, object], expected: bool
) -> None:
    asked: list[object] = []

    def backend(*of_the_cache: object, **options: object) -> AttentionBackend:
        asked.append(options.pop("cascade"))
        return attention_backend(*of_the_cache, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("engine.local.device.attention_backend", backend)
    settings = {"device": "cpu", "dtype": "float32", "num_blocks": 4, "kernels": "torch", **given}
    LocalDevice(make_model(tmp_path / "llama", FAMILIES["llama"]), EngineSettings.model_validate(settings))
    assert asked == [expected]
