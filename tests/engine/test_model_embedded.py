"""The embedded model: what is accepted, and its conversion from the package that carries it."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from common.errors import StartupError
from common.model_files import checkpoint_dtype, model_identity, open_model, tokenizer_files
from engine.loading import embedded_model
from engine.loading.embedded_model import ensure_model
from tests.engine.tiny_models import full_logprobs, make_model

NAME = "smollm2-135m-instruct"


def silent(line: str) -> None:
    raise AssertionError(f"unexpected report: {line}")


def test_a_directory_is_checked_and_returned(tmp_path: Path) -> None:
    path = make_model(tmp_path / "own")
    assert ensure_model(str(path), str(tmp_path / "cache"), silent) == path
    (path / "config.json").unlink()
    with pytest.raises(StartupError, match=r"has no config\.json"):
        ensure_model(str(path), str(tmp_path / "cache"), silent)


@pytest.mark.parametrize("name", ["llama-7b", "org/name/more", "/no/such/dir"])
def test_other_names_say_what_to_do(tmp_path: Path, name: str) -> None:
    with pytest.raises(StartupError, match="--model takes") as caught:
        ensure_model(name, str(tmp_path), silent)
    assert NAME in caught.value.message


def test_a_missing_package_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_model, "_PACKAGE", "no_such_package")
    with pytest.raises(StartupError, match="pip install"):
        ensure_model(NAME, str(tmp_path), silent)


def test_a_converted_model_needs_no_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_model, "_PACKAGE", "no_such_package")
    monkeypatch.setattr(embedded_model, "_DISTRIBUTION", "no-such-distribution")
    for version in ("0.1", "0.2"):
        make_model(tmp_path / "models" / f"{NAME}-{version}")
    (tmp_path / "models" / f".{NAME}-0.3.partial").mkdir()
    assert ensure_model(NAME, str(tmp_path), silent) == tmp_path / "models" / f"{NAME}-0.2"


def test_what_an_earlier_conversion_left_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded_model, "_PACKAGE", "no_such_package")
    monkeypatch.setattr(embedded_model, "_DISTRIBUTION", "pytest")
    version = importlib.metadata.version("pytest")
    make_model(tmp_path / "models" / f"{NAME}-{version}")
    with pytest.raises(StartupError, match="pip install"):  # it would convert
        ensure_model(NAME, str(tmp_path), silent)
    made = make_model(tmp_path / "models" / f"{NAME}-{version}-{embedded_model._REVISION}")
    assert ensure_model(NAME, str(tmp_path), silent) == made


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    if not embedded_model.package_is_installed():
        pytest.skip("the embedded model's package is not installed")
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="--cache-dir"):
        ensure_model(NAME, str(tmp_path / "file"), silent)


def converter(cache: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "engine.loading.embedded_model", "--cache-dir", str(cache)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_conversion_survives_a_kill_and_runs_once(tmp_path: Path) -> None:
    if not embedded_model.package_is_installed():
        pytest.skip("the embedded model's package is not installed")
    models = tmp_path / "models"
    killed = converter(tmp_path)
    deadline = time.monotonic() + 120
    while not list(models.glob(".*.partial")):
        assert killed.poll() is None, "it ended before a conversion was seen"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert [path for path in models.iterdir() if not path.name.startswith(".")] == []

    converters = [converter(tmp_path) for _ in range(2)]
    outputs = [process.communicate(timeout=250) for process in converters]
    assert [process.returncode for process in converters] == [0, 0], outputs
    assert outputs[0][0] == outputs[1][0] != ""
    assert sum("ready in" in errors for _, errors in outputs) == 1
    left = [path.name for path in models.iterdir()]
    assert [name for name in left if name.endswith(".partial")] == []

    path = ensure_model("HuggingFaceTB/SmolLM2-135M-Instruct", str(tmp_path), silent)
    assert str(path) == outputs[0][0].strip()
    assert ensure_model("SmolLM2-135M-Instruct", str(tmp_path), silent) == path
    with next(models.glob(".*.lock")).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody holds it


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of transformers, about the age of what it loads
def test_converted_model_is_the_gguf(tmp_path: Path) -> None:
    if not embedded_model.package_is_installed():
        pytest.skip("the embedded model's package is not installed")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from common.config import EngineSettings
    from common.sampling import SamplingParams
    from engine.local.device import LocalDevice
    from engine.sampling.draws import draw
    from engine.step import StepRow

    path = ensure_model(NAME, str(tmp_path), lambda line: None)
    gguf = embedded_model._gguf_file()
    files = tokenizer_files(path)
    assert {"tokenizer.json", "chat_template.jinja", "generation_config.json"} <= set(files)
    assert json.loads(files["generation_config.json"])["eos_token_id"] == 2
    assert open_model(path).eos_token_ids == [2]
    assert len(model_identity(path)) == 32
    assert checkpoint_dtype(open_model(path)) == "bfloat16"  # the original's, though the tensors are float32

    tokenizer = AutoTokenizer.from_pretrained(path)
    text = "Grüße, 世界! def f(x):\n    return x ** 2  # Что?"
    original = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    token_ids: list[int] = tokenizer(text)["input_ids"]
    assert token_ids == original(text)["input_ids"]
    assert tokenizer.decode(token_ids) == text
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == original.apply_chat_template(chat, tokenize=False)

    pytest.importorskip("accelerate", reason="transformers needs it to load a GGUF")
    reference = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    with torch.inference_mode():
        expected = reference(torch.tensor([token_ids])).logits[0, -1].log_softmax(-1)
    runner = LocalDevice(path, EngineSettings(dtype="float32", num_blocks=8))
    params = SamplingParams(temperature=0.0, logprobs=runner.info.vocab_size)
    sample = draw(params=params, num_output_tokens=0)
    step = StepRow(token_ids=token_ids, num_computed_tokens=0, block_ids=[5, 3, 1], draw=sample)
    (token,) = runner.execute([step])
    assert token is not None
    torch.testing.assert_close(full_logprobs(token, runner.info.vocab_size), expected, atol=1e-3, rtol=0)
