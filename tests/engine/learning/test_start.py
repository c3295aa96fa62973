"""What an engine knows of its steps' times when it starts, with a real device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from common.batch_time import StepShape
from common.batch_time_file import decode, encode
from common.config import EngineSettings
from common.errors import ConfigError
from engine.learning.key import key_of, model_file
from engine.learning.learner import Source
from engine.learning.quick import NUM_STEPS, points, quick_model
from engine.learning.report import BatchTimeReporter
from engine.learning.start import start_learning
from engine.learning.step_trace import read_trace
from engine.local.device import LocalDevice
from engine.profile.design import Limits
from engine.step import StepRow
from tests.engine.learning.test_learner import good_model
from tests.engine.tiny_models import make_model


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> LocalDevice:
    model = make_model(tmp_path_factory.mktemp("model") / "llama", {})
    device = LocalDevice(model, EngineSettings(num_blocks=64, num_threads=1))
    device.warm_up()
    return device


def settings(tmp_path: Path) -> EngineSettings:
    return EngineSettings(num_blocks=64, num_threads=1, cache_dir=str(tmp_path))


def test_without_a_file_there_is_a_rough_model(device: LocalDevice, tmp_path: Path) -> None:
    _, learner = start_learning(device, settings(tmp_path))
    assert learner.standing.source is Source.QUICK
    assert learner.model is not None
    assert learner.model.seconds(StepShape(num_decodes=3, decode_context=90, num_head_rows=3)) > 0
    (told,) = BatchTimeReporter(learner).due(0.0)
    assert decode(told.model).key == key_of(device, settings(tmp_path))
    assert (told.source, told.version, told.drifts) == ("quick", 1, False)


def test_a_profile_of_this_device_is_used(device: LocalDevice, tmp_path: Path) -> None:
    key = key_of(device, settings(tmp_path))
    model_file(str(tmp_path), key).write_bytes(encode(replace(good_model(), key=key)))
    _, learner = start_learning(device, settings(tmp_path))
    assert learner.standing.source is Source.FILE
    assert learner.model is not None
    assert learner.model.key == key


@pytest.mark.parametrize(
    ("damage", "reason"),
    [(lambda data: data[:-9], "is of no use"), (lambda data: data.replace(b'"schema": 1', b'"schema": 7'), "schema 7")],
)
def test_a_damaged_profile_is_named_and_not_used(
    device: LocalDevice, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: object, reason: str
) -> None:
    assert callable(damage)
    key = key_of(device, settings(tmp_path))
    path = model_file(str(tmp_path), key)
    path.write_bytes(damage(encode(replace(good_model(), key=key))))
    _, learner = start_learning(device, settings(tmp_path))
    assert learner.standing.source is Source.QUICK
    (record,) = [one for one in caplog.records if "not used" in one.message]
    said = str(vars(record)["reason"])
    assert str(path) in said
    assert reason in said
    assert "make it again by `baton profile`" in said


def test_a_profile_of_something_else_is_refused_by_name(
    device: LocalDevice, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    key = key_of(device, settings(tmp_path))
    model_file(str(tmp_path), key).write_bytes(encode(replace(good_model(), key=replace(key, processor="Z80"))))
    _, learner = start_learning(device, settings(tmp_path))
    assert learner.standing.source is Source.QUICK
    assert f"is for processor Z80, here it is {key.processor}" in str([vars(one) for one in caplog.records])


def test_steps_are_traced(device: LocalDevice, tmp_path: Path) -> None:
    path = tmp_path / "steps"
    observed, _ = start_learning(device, settings(tmp_path), str(path))
    for _ in range(3):
        observed.execute([StepRow(token_ids=[1, 2], num_computed_tokens=0, block_ids=[0])])
    observed.close()
    key, _ = read_trace(path)
    assert key == key_of(device, settings(tmp_path))
    assert len(path.read_text().splitlines()) == 4


def test_a_trace_that_cannot_be_written_is_named(device: LocalDevice, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--step-trace.*cannot be written"):
        start_learning(device, settings(tmp_path), str(tmp_path / "nowhere" / "steps"))


@pytest.mark.parametrize(
    "limits", [Limits(400, 16, 4000, 97, 64, 512), Limits(20, 16, 64, 97, 3, 40), Limits(1, 16, 16, 97, 1, 8)]
)
def test_quick_steps_fit_the_device(limits: Limits) -> None:
    found = list(points(limits))
    assert 0 < len(found) <= NUM_STEPS
    for point in found:
        assert point.num_blocks(limits.block_size) <= limits.num_blocks
        assert len(point.decodes) <= limits.max_rows


def test_a_device_that_is_too_slow_has_no_rough_model(device: LocalDevice, tmp_path: Path) -> None:
    key = key_of(device, settings(tmp_path))
    assert quick_model(device, key, settings(tmp_path), budget_s=0.0) is None
