"""A step waits for the device once: when it reads its tokens. On a GPU, each further wait leaves it idle.

Without a GPU, a tensor class stands for tensors on a device. What is copied to the device is of it, and so is what is
computed from that. Whatever reads an element of such a tensor on the host raises: each would be a wait.
(`tests/gpu/test_cuda.py` does the same with CUDA's own check.)
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from common.config import EngineSettings
from common.sampling import SamplingParams
from engine import device_copies
from engine.attention.base import AttentionShape
from engine.attention.flashinfer import FlashInferBackend
from engine.local.device import LocalDevice
from engine.sampling.draws import draw
from engine.sampling.logit_changes import LogitChanges
from engine.step import StepRow
from tests.engine.fake_flashinfer import fake_flashinfer
from tests.engine.tiny_models import FAMILIES, make_model

NUM_BLOCKS = 24
WAITS = {
    *(torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.__bool__),
    *(torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__, torch.Tensor.__contains__),
    *(torch.Tensor.nonzero, torch.nonzero, torch.Tensor.unique, torch.unique, torch.unique_consecutive),
    *(torch.masked_select, torch.Tensor.masked_select, torch.equal, torch.allclose, torch.bincount),
}


class DeviceWaitError(AssertionError):
    pass


class OnDevice(torch.Tensor):
    """A tensor whose elements the host may not read."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        places = args[1] if func in (torch.Tensor.__getitem__, torch.Tensor.__setitem__) else ()
        by_mask = any(
            isinstance(one, OnDevice) and one.dtype == torch.bool
            for one in (places if isinstance(places, tuple) else (places,))
        )
        if func in WAITS or by_mask:
            raise DeviceWaitError(f"{getattr(func, '__name__', func)} waits for the device")
        return super().__torch_function__(func, types, args, kwargs or {})


class Reads:
    """Stands for `read`, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[list[float]]:
        self.count += 1
        assert isinstance(tensors[0], OnDevice), "tokens are the device's"
        return device_copies.read([tensor.as_subclass(torch.Tensor) for tensor in tensors])


def everywhere(patch: pytest.MonkeyPatch, name: str, value: object) -> None:
    """Replaces a function of `device_copies` in each module that imported it."""
    original = getattr(device_copies, name)
    for module_name, module in list(sys.modules.items()):
        is_other = module_name.startswith("engine.") and module is not device_copies
        if is_other and getattr(module, name, None) is original:
            patch.setattr(module, name, value)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    to_device, reads = device_copies.to_device, Reads()

    def to_stand_in(*args: object, **kwargs: object) -> torch.Tensor:
        return to_device(*args, **kwargs).as_subclass(OnDevice)  # type: ignore[arg-type]

    everywhere(monkeypatch, "to_device", to_stand_in)
    everywhere(monkeypatch, "read", reads)
    return reads


@pytest.fixture(scope="module", params=["llama", "gemma2"])  # of experts a CPU computes one by one
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / request.param, FAMILIES[request.param])


def open_device(path: Path, patch: pytest.MonkeyPatch, attention: str) -> LocalDevice:
    given = {"device": "cpu", "dtype": "float32", "num_blocks": NUM_BLOCKS, "kernels": "torch"}
    settings = EngineSettings.model_validate(given)
    if attention == "torch":
        return LocalDevice(path, settings, attention="torch", raises=True)
    fake_flashinfer(patch)
    device = LocalDevice(path, settings, raises=True)
    model, spec = device._model, device.info.spec
    shape = AttentionShape(
        num_heads=model.num_heads,
        softmax_scale=model.softmax_scale,
        windows=model.windows,
        soft_cap=model.soft_cap,
    )
    patch.setattr("engine.attention.flashinfer_cascade.MIN_SAVED_BYTES", 1)
    device._attention = FlashInferBackend(device.kv_cache, spec, shape, cascade=attention == "cascade")
    return device


KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "logprobs": SamplingParams(temperature=0.0, logprobs=3),
    "sampled": SamplingParams(temperature=0.9, seed=4),
    "filtered": SamplingParams(temperature=0.9, seed=4, top_p=0.9, top_k=9, min_p=0.01),
    "edited": SamplingParams(temperature=0.0, repetition_penalty=1.1, logit_bias={3: 1.0}, bad_words_ids=()),
    "few": SamplingParams(temperature=0.0, allowed_token_ids=(5, 6)),
}


@pytest.mark.parametrize("attention", ["flashinfer", "cascade", "torch"])
def test_a_step_reads_once(path: Path, attention: str, reads: Reads, monkeypatch: pytest.MonkeyPatch) -> None:
    device = open_device(path, monkeypatch, attention)
    device.kv_cache.zero_()
    for kind, params in KINDS.items():
        changes = LogitChanges(params, [3, 4], frozenset()) if params.changes_logits else None
        asked = draw(params, 0, changes)
        for sizes in ((1, 1), (1, 17, 1), (20,)):
            reads.count = 0
            # The first block is shared, which is read once if the attention cascades.
            tables = [[0, 3 * row + 1, 3 * row + 2] for row in range(len(sizes))]
            device.execute(
                [
                    StepRow(token_ids=[7] * size, num_computed_tokens=16, block_ids=table, draw=asked)
                    for size, table in zip(sizes, tables, strict=True)
                ]
            )
            assert reads.count == 1, (kind, sizes)
    reads.count = 0
    device.execute([StepRow(token_ids=[7] * 20, num_computed_tokens=0, block_ids=[0, 1])])  # draws nothing
    assert reads.count == 0


@pytest.mark.parametrize(
    "wait",
    [
        lambda tensor: tensor.tolist(),
        lambda tensor: tensor[0].item(),
        lambda tensor: tensor.cpu(),
        lambda tensor: tensor.numpy(),
        lambda tensor: tensor + 1 if tensor[0] else tensor,
        lambda tensor: int(tensor[0]),
        lambda tensor: tensor[tensor > 1],
        lambda tensor: tensor.nonzero(),
        lambda tensor: torch.masked_select(tensor, tensor > 1),
    ],
)
def test_each_wait_is_noticed(wait: Callable[[torch.Tensor], object]) -> None:
    tensor = (torch.arange(3).as_subclass(OnDevice) * 2).float()
    with pytest.raises(DeviceWaitError, match="waits for the device"):
        wait(tensor)
