"""The benchmark of loading says at once that a machine is too small for it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench import loading


def test_a_machine_that_is_too_small_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_weights = sum(torch.Size(shape).numel() for shape in loading.tensors_of("8b").values())
    assert 8.0e9 < num_weights < 8.1e9
    monkeypatch.setattr(loading, "available_bytes", lambda: 4_000_000_000)
    reason = loading.refusal(tmp_path, 1, 2 * num_weights)
    assert reason == "4.0 GB of memory are available, loading needs 18.7 GB"
    monkeypatch.setattr(loading, "available_bytes", lambda: 19_000_000_000)
    assert loading.refusal(tmp_path, 1, 2 * num_weights) == ""
    assert "GB free, the files need 1000000.0 GB; set --folder" in loading.refusal(tmp_path, 10**15, 1)
