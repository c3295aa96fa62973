"""What a model runner refuses to start with, and the one line that it says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.config import EngineSettings
from common.cpu import read_cpu
from common.errors import InternalError, StartupError
from common.model_files import open_model
from engine.kernels.choice import choose
from engine.loading.dtype import fast_dtypes, resolve_dtype
from engine.local.device import LocalDevice
from engine.local.memory import num_cache_blocks, weight_bytes
from engine.step import StepRow
from tests.engine.tiny_models import VOCAB_SIZE, edit_config, make_model, make_runner
from tests.support.fake_device import SPEC


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "runner")


@pytest.fixture
def model_dir(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "model"))


def start(model_dir: Path, **settings: object) -> LocalDevice:
    given = {"device": "cpu", "dtype": "float32", "num_threads": 1, **settings}
    return LocalDevice(model_dir, EngineSettings.model_validate(given))


def test_what_a_runner_tells(model_dir: Path) -> None:
    runner = start(model_dir, num_blocks=20)
    assert runner.info.num_blocks == 20
    assert runner.kv_cache.shape == (20, 3, 2, 2, 16, 16)
    assert runner.kv_cache.is_contiguous()
    assert runner.kv_cache[0].nbytes == runner.info.spec.block_bytes
    assert (runner.info.vocab_size, runner.info.eos_token_ids, runner.info.max_model_len) == (VOCAB_SIZE, (2,), 256)


def test_warming_up_leaves_no_memory_to_be_had_for_the_longest_context(model_dir: Path) -> None:
    """Else the first long prompt's first tokens wait for its pages."""
    runner = start(model_dir, num_blocks=20, kernels="torch")
    runner.warm_up()
    workspace = runner._attention._workspace.data_ptr()  # type: ignore[attr-defined]
    last = runner.info.max_model_len - 1
    runner.execute([StepRow(token_ids=[1], num_computed_tokens=last, block_ids=list(range(16)))])
    assert runner._attention._workspace.data_ptr() == workspace  # type: ignore[attr-defined]


def test_kv_cache_memory_decides_the_number_of_blocks(model_dir: Path) -> None:
    runner = start(model_dir, kv_cache_memory_gb=0.01)
    assert runner.info.num_blocks == int(0.01 * 2**30) // runner.info.spec.block_bytes


def test_a_small_cache_shortens_a_context_that_nobody_asked_for(model_dir: Path) -> None:
    assert start(model_dir, num_blocks=4).info.max_model_len == 64


def rewrite(model_dir: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    file = model_dir / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)


def drop_a_tensor(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.1.mlp.up_proj.weight"]


def add_a_tensor(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.1.surprise.weight"] = torch.zeros(2)


def reshape_a_tensor(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.zeros(63)


def quantise_a_tensor(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"] = torch.zeros(64, dtype=torch.int8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (drop_a_tensor, "lacks tensor model.layers.1.mlp.up_proj.weight"),
        (add_a_tensor, "model.layers.1.surprise.weight"),
        (reshape_a_tensor, "model.norm.weight has shape [63]"),
        (quantise_a_tensor, "model.norm.weight is torch.int8. It looks quantised"),
    ],
)
def test_wrong_weights_are_named(
    model_dir: Path, change: Callable[[dict[str, torch.Tensor]], None], words: str
) -> None:
    rewrite(model_dir, change)
    assert words in refusal(model_dir)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
@pytest.mark.parametrize("capability", ["avx2", ""])
def test_the_dtype_is_the_checkpoints_own_if_the_cpu_is_fast_in_it(
    capability: str, kernels: str, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", capability)
    edit_config(model_dir, dtype="bfloat16")
    runner = start(model_dir, dtype="auto", num_blocks=16, kernels=kernels)
    expected = torch.bfloat16 if "bfloat16" in fast_dtypes(read_cpu(), choose(kernels)) else torch.float32
    assert (runner.dtype, runner.kv_cache.dtype) == (expected, expected)
    assert getattr(torch, runner.info.spec.dtype) == expected
    assert runner.info.dtype_reason == resolve_dtype("auto", model_dir, "cpu", kernels).reason


def test_weights_cut_short(model_dir: Path) -> None:
    file = model_dir / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    assert "not a readable safetensors file" in refusal(model_dir)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["NoSuchForCausalLM"]}, "LlamaForCausalLM, MistralForCausalLM"),
        ({"architectures": None}, "LlamaForCausalLM, MistralForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"hidden_size": "big"}, "hidden_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1.0, "factor": 2.0}}, "yarn"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1.0}}, "factor"),
    ],
)
def test_wrong_configs_are_named(model_dir: Path, config: dict[str, object], words: str) -> None:
    edit_config(model_dir, **config)
    assert words in refusal(model_dir)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_len": 257}, "--max-model-len 257 is more than the 256 positions"),
        ({"max_model_len": 100, "num_blocks": 6}, "--num-blocks"),
        ({"num_blocks": 10**9}, "lower --num-blocks"),
        ({"kv_cache_memory_gb": 10**6}, "lower --kv-cache-memory-gb"),
        ({"kv_cache_memory_gb": 1e-6}, "raise --kv-cache-memory-gb"),
        ({"device": "abacus"}, "--device"),
        ({"device": "meta"}, "--device"),
    ],
)
def test_wrong_settings_are_named(model_dir: Path, settings: dict[str, object], words: str) -> None:
    assert words in refusal(model_dir, **settings)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there(model_dir: Path) -> None:
    assert "--device cpu" in refusal(model_dir, device="cuda")


def test_weights_that_exceed_the_memory(model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.local.memory.available_bytes", lambda: 1000)
    assert "0.0 GiB are available" in refusal(model_dir)


def test_kv_caches_of_ranks_have_to_fit_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.local.memory.available_bytes", lambda: 3 << 30)
    settings = EngineSettings(kv_cache_memory_gb=1.0)  # of each rank
    assert num_cache_blocks(SPEC, torch.device("cpu"), settings, 2) == (1 << 30) // SPEC.block_bytes
    with pytest.raises(StartupError, match=r"^the KV cache needs 3\.00 GiB, 2\.25 GiB are available"):
        num_cache_blocks(SPEC, torch.device("cpu"), settings, 3)


def test_weight_bytes(model_dir: Path) -> None:
    tensors = load_file(model_dir / "model.safetensors")
    assert weight_bytes(open_model(model_dir), 2) == 2 * sum(t.numel() for t in tensors.values())


def test_a_head_that_repeats_the_embedding_takes_no_memory(model_dir: Path) -> None:
    edit_config(model_dir, tie_word_embeddings=True)
    tensors = load_file(model_dir / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, model_dir / "model.safetensors", metadata={"format": "pt"})
    read = [tensor for name, tensor in tensors.items() if name != "lm_head.weight"]
    assert weight_bytes(open_model(model_dir), 2) == 2 * sum(tensor.numel() for tensor in read)
    start(model_dir)


def refusal(model_dir: Path, **settings: object) -> str:
    with pytest.raises(StartupError) as caught:
        start(model_dir, **settings)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("num_tokens", "num_computed", "num_blocks"), [(17, 0, 1), (1, 16, 1), (0, 3, 1), (1, 256, 17)]
)
def test_a_step_that_cannot_be(model_dir: Path, num_tokens: int, num_computed: int, num_blocks: int) -> None:
    runner = make_runner(model_dir)
    step = StepRow(token_ids=[1] * num_tokens, num_computed_tokens=num_computed, block_ids=list(range(num_blocks)))
    with pytest.raises(InternalError):
        runner.execute([step])
