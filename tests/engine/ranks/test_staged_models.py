"""Models whose stages several processes compute give the logprobs that one process gives."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.device import Device
from engine.local.device import LocalDevice
from engine.ranks.shared_memory import exchange_library
from tests.engine.kernels.variants import ALL
from tests.engine.ranks.devices import settings_of, staged
from tests.engine.tiny_models import FAMILIES, SHAPES, advance, make_model, random_sequences

pytestmark = pytest.mark.skipif(exchange_library() is None, reason="the library was not built")

TOLERANCE = 2e-4  # of float32 logprobs, as between a family and transformers

MODELS = {
    **{name: flags for name, flags in FAMILIES.items() if name != "mistral_without_window"},
    **{name: SHAPES[name] for name in ("tied", "biases", "one_kv_head")},
}


def logprobs(device: Device) -> list[dict[int, torch.Tensor]]:
    sequences = random_sequences([50, 40], num_blocks=40)
    for sizes in ((33, 1), (14, 30), (1, 1), (1, 7), (1, 1)):
        advance(device, sequences, sizes)
    return [sequence.logprobs for sequence in sequences]


@pytest.mark.parametrize("kernels", [pytest.param("torch", marks=pytest.mark.slow), ALL[-1]])
@pytest.mark.parametrize(
    "name", [name if name == "mixtral" else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
@pytest.mark.usefixtures("short_parts")
def test_families_give_what_one_process_gives(tmp_path: Path, name: str, kernels: str) -> None:
    path = make_model(tmp_path / name, MODELS[name])
    expected = logprobs(LocalDevice(path, settings_of(1, kernels=kernels)))
    with staged(path, 3, kernels=kernels) as device:
        found = logprobs(device)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        for position, one in ours.items():
            torch.testing.assert_close(one, theirs[position], atol=TOLERANCE, rtol=0, equal_nan=True)
