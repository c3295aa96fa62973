"""Checkpoints that other projects' own code has quantised and packed (tests/engine/quantized/make.py)."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from common.errors import StartupError
from common.model_files import open_model
from engine.kernels.grouped import PackedGrouped, PackedParts, QuantizedTensor
from engine.loading.checkpoints.hf_quantized import quantized_tensors, scheme_of
from engine.loading.checkpoints.safetensors_file import TensorInFile
from engine.local.memory import weight_bytes
from engine.models.decoder import Decoder
from tests.engine.kernels.variants import VARIANTS, best_and_slow_others, kernels
from tests.engine.quantized.make import probes
from tests.engine.test_model_families import check
from tests.engine.tiny_models import FAMILIES, advance, edit_config, make_model, make_runner, random_sequences

FIXTURES = Path(__file__).parent / "quantized"
NAMES = sorted(path.name for path in FIXTURES.iterdir() if (path / "config.json").exists())
WIDENED = "gptq-4-act-order"

each_fixture = pytest.mark.parametrize("name", NAMES)
needs_kernels = pytest.mark.skipif(not VARIANTS, reason="no kernels were built")


@pytest.fixture
def path(tmp_path: Path, name: str) -> Path:
    target = tmp_path / name
    shutil.copytree(FIXTURES / name, target)
    (target / "expected.safetensors").rename(tmp_path / "expected.safetensors")
    (target / "tokenizer.json").write_text("{}")
    return target


def matrices(path: Path) -> dict[str, torch.Tensor | QuantizedTensor]:
    files = open_model(path)
    scheme = scheme_of(files.config)
    assert scheme is not None
    found: dict[str, torch.Tensor | QuantizedTensor] = {}
    for each in quantized_tensors(files, scheme):
        assert not isinstance(each.tensor, TensorInFile)
        found[each.name] = each.tensor
    return found


def dequantized(tensor: torch.Tensor | QuantizedTensor) -> torch.Tensor:
    return tensor.float() if isinstance(tensor, torch.Tensor) else tensor.rows(0, tensor.shape[0]).dequantize()


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert (actual - expected).norm() <= 1e-3 * expected.norm()


@each_fixture
def test_matrices_are_what_their_project_says(path: Path, name: str) -> None:
    found, expected = matrices(path), load_file(path.parent / "expected.safetensors")
    assert len(expected) == 7
    for key, product in expected.items():
        tensor = found[key]
        assert isinstance(tensor, torch.Tensor) == (name == WIDENED)
        probe = probes(tensor.shape[1])
        assert_near(dequantized(tensor) @ probe, product)
        if isinstance(tensor, torch.Tensor):
            continue
        for variant in VARIANTS:
            assert_near(PackedGrouped(kernels(variant), tensor)(probe.T.contiguous()).T, product)


@pytest.mark.parametrize("backend", best_and_slow_others)
@each_fixture
def test_logits_are_those_of_the_dequantised_model(path: Path, tmp_path: Path, backend: str) -> None:
    plain = tmp_path / "plain"
    shutil.copytree(path, plain)
    edit_config(plain, quantization_config=None)
    tensors = {key: dequantized(tensor).contiguous() for key, tensor in matrices(path).items()}
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    runner = make_runner(path, kernels=backend)
    (sequence,) = random_sequences([50])
    for size in (30, 1, 1, 18):
        advance(runner, [sequence], [size])
    check(plain, sequence)


@needs_kernels
@pytest.mark.parametrize("name", ["awq", "w8a16", "fp8"])
def test_quantised_matrices_stay_so(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        make_runner(path)
    assert "quantised weights stay as they are" in caplog.text
    size = (path / "model.safetensors").stat().st_size
    assert weight_bytes(open_model(path), 2) < size
    with pytest.raises(StartupError, match="is quantised already"):
        make_runner(path, quantization="int4")


@pytest.mark.parametrize("name", [WIDENED])
def test_another_order_of_groups_is_widened_and_said(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        make_runner(path)
    (record,) = [record for record in caplog.records if "they are widened" in record.message]
    assert vars(record)["weights"] == 7


@pytest.mark.parametrize("name", ["w8a16"])
def test_quantised_activations_are_left_and_said(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = json.loads((path / "config.json").read_text())["quantization_config"]
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "int", "dynamic": True}
    edit_config(path, quantization_config=config)
    with caplog.at_level(logging.INFO):
        make_runner(path)
    assert "quantised activations; they stay in full precision" in caplog.text


def pack_fp8(path: Path) -> dict[str, torch.Tensor]:
    """Quantises a checkpoint's projections as transformers' own code does. Returns what it says that they mean."""
    settings = FineGrainedFP8Config(weight_block_size=(128, 128))
    quantizer = SimpleNamespace(quantization_config=settings)
    pack, unpack = Fp8Quantize(quantizer), Fp8Dequantize(quantizer)
    tensors, plain = load_file(path / "model.safetensors"), {}
    for name in [name for name in tensors if "proj" in name or ".experts." in name]:
        rows, columns = tensors[name].shape
        whole = torch.nn.functional.pad(tensors[name], (0, -columns % 128, 0, -rows % 128))
        packed = pack.convert({name: whole})
        codes, scale = packed[name], packed[f"{name}_scale_inv"]
        assert codes.dtype is torch.float8_e4m3fn
        tensors |= {name: codes[:rows, :columns].contiguous(), f"{name}_scale_inv": scale}
        plain[name] = unpack._dequantize_one(codes, scale)[:rows, :columns]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    edit_config(path, quantization_config=settings.to_dict())
    return plain


def test_square_blocks_of_fp8(tmp_path: Path) -> None:
    """As transformers' own code packs them. A last block may be smaller, as in DeepSeek's checkpoints: transformers
    packs whole blocks alone, so it gets zeros behind the weights, which are cut off again."""
    path = make_model(tmp_path / "model", {"hidden_size": 160, "intermediate_size": 256})
    plain = pack_fp8(path)
    found = matrices(path)
    assert len(plain) == 7 * 3
    for name, weight in plain.items():
        assert torch.equal(dequantized(found[name]), weight)


@pytest.mark.parametrize("backend", best_and_slow_others)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_that_are_quantised(tmp_path: Path, family: str, backend: str) -> None:
    """They stay so on the kernels, and give what the dequantised ones give."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}
    if family == "qwen3_moe":
        sizes |= {"intermediate_size": 128, "moe_intermediate_size": 256}
    path = make_model(tmp_path / "model", {**FAMILIES[family], **sizes})
    plain = shutil.copytree(path, tmp_path / "plain")
    meant = pack_fp8(path)
    tensors = load_file(plain / "model.safetensors")
    assert sum(".experts." in name for name in meant) > sum("self_attn" in name for name in meant) > 0
    save_file({**tensors, **{name: each.contiguous() for name, each in meant.items()}}, plain / "model.safetensors")
    runner = make_runner(path, kernels=backend)
    decoder = runner._model
    assert isinstance(decoder, Decoder)
    experts = [layer.experts.mlps for layer in decoder.layers if layer.experts is not None]
    assert len(experts) == (3 if family == "mixtral" else 2)
    for linear in (each for mlps in experts for each in (*mlps.gate_ups, *mlps.downs)):
        assert (linear.packed is None) == (backend == "torch")
        assert linear.packed is None or isinstance(linear.packed, PackedGrouped | PackedParts)
    (sequence,) = random_sequences([50])
    for size in (30, 1, 1, 18):
        advance(runner, [sequence], [size])
    check(plain, sequence)


def refusal(path: Path) -> str:
    with pytest.raises(StartupError) as caught:
        make_runner(path)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize("method", ["bitsandbytes", "mxfp4", "quanto", "hqq", "eetq", "torchao", ""])
def test_other_methods_are_refused_by_name(tmp_path: Path, method: str) -> None:
    path = make_model(tmp_path / "model")
    edit_config(path, quantization_config={"quant_method": method, "bits": 4})
    message = refusal(path)
    assert f"quantization_config of {method or 'an unknown method'} is not supported; known are awq, gptq" in message


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"quant_method": "awq", "version": "gemv"}, "AWQ other than 4 bits in version gemm"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ with 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'"),
        (
            {"quant_method": "compressed-tensors", "format": "int-quantized", "kv_cache_scheme": {"num_bits": 8}},
            "kv_cache_scheme",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "config_groups": {"group_0": {"weights": {"num_bits": 3}}},
            },
            "weights of 3 bits",
        ),
    ],
)
def test_other_variants_are_refused(tmp_path: Path, config: dict[str, object], says: str) -> None:
    path = make_model(tmp_path / "model")
    edit_config(path, quantization_config=config)
    assert says in refusal(path)


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("awq", "qzeros", "lacks tensor model.layers.0.mlp.up_proj.qzeros"),
        ("gptq-4", "scales", "lacks tensor model.layers.0.mlp.up_proj.scales"),
        ("w4a16", "weight_shape", "lacks tensor model.layers.0.mlp.up_proj.weight_shape"),
        ("fp8", "weight_scale", "lacks tensor model.layers.0.mlp.up_proj.weight_scale"),
        ("w4a16", "weight_packed", "lacks tensor model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_a_tensor_that_is_missing_is_named(path: Path, tensor: str, says: str) -> None:
    tensors = load_file(path / "model.safetensors")
    del tensors[f"model.layers.0.mlp.up_proj.{tensor}"]
    save_file(tensors, path / "model.safetensors")
    assert says in refusal(path)


@pytest.mark.parametrize(
    ("name", "tensor"), [("awq", "scales"), ("gptq-4", "qzeros"), ("w4a16", "weight_scale"), ("fp8", "weight_scale")]
)
def test_a_tensor_of_another_shape_is_named(path: Path, tensor: str) -> None:
    tensors = load_file(path / "model.safetensors")
    name = f"model.layers.0.mlp.up_proj.{tensor}"
    tensors[name] = tensors[name][:-1, :].contiguous() if tensor != "scales" else tensors[name][:, :-8].contiguous()
    save_file(tensors, path / "model.safetensors")
    assert name in refusal(path)
