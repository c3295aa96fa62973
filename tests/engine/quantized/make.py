"""Makes the fixtures beside it: small checkpoints packed by the code of AutoAWQ, AutoGPTQ and compressed-tensors.

    pip download --no-deps autoawq==0.2.9 auto-gptq==0.7.1 compressed-tensors==0.20.0   # and unpack them
    python -m tests.engine.quantized.make AUTOAWQ_DIR AUTO_GPTQ_DIR COMPRESSED_TENSORS_DIR

Each fixture is a Llama of one layer (config.json, model.safetensors), with `expected.safetensors`: what the project's
own code says that each quantised matrix means, times the columns of `probes`.
"""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.engine.tiny_models import make_model

FOLDER = Path(__file__).parent
GROUP = 32
BLOCK = (48, 64)  # of which neither the rows nor the columns of every matrix are a multiple
SHAPE: dict[str, object] = {"num_hidden_layers": 1, "intermediate_size": 96, "tie_word_embeddings": True}
Packed = tuple[dict[str, torch.Tensor], torch.Tensor]  # tensors by their names in the module, and the matrix they mean


def probes(k: int) -> torch.Tensor:
    """`[k, 8]`, never the same for two rows."""
    return torch.randn(k, 8, generator=torch.Generator().manual_seed(k))


def steps(weight: torch.Tensor, group: int, *, symmetric: bool, bits: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zeros `[n, k / group]`."""
    parts = weight.view(len(weight), -1, group)
    if symmetric:
        half = 2 ** (bits - 1)
        scale = parts.abs().amax(-1) / (half - 1)
        return scale.half().float(), torch.full_like(scale, half)
    least, most = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scale = ((most - least) / (2**bits - 1)).half().float()
    return scale, (-least / scale).round().clamp(0, 2**bits - 1)


def stand_in(name: str, folder: Path) -> None:
    """A package whose own `__init__` is not run."""
    module = types.ModuleType(name)
    module.__path__ = [str(folder)]
    sys.modules[name] = module


def awq(folder: Path) -> Callable[[torch.Tensor], Packed]:
    for name in ("awq", "awq.utils", "awq.modules", "awq.modules.linear"):
        stand_in(name, folder / name.replace(".", "/"))
    from awq.modules.linear.gemm import WQLinear_GEMM  # type: ignore[import-not-found]
    from awq.utils.packing_utils import dequantize_gemm  # type: ignore[import-not-found]

    def pack(weight: torch.Tensor) -> Packed:
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight.data = weight.clone()
        scale, zero = steps(weight, GROUP, symmetric=False)
        packed = WQLinear_GEMM.from_linear(linear, 4, GROUP, scales=scale.T.contiguous(), zeros=zero.T.contiguous())
        tensors = {"qweight": packed.qweight, "qzeros": packed.qzeros, "scales": packed.scales}
        meant = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales, 4, GROUP)
        return tensors, meant.float().T

    return pack


def gptq(folder: Path, *, bits: int, in_order: bool, symmetric: bool) -> Callable[[torch.Tensor], Packed]:
    for name in ("auto_gptq", "auto_gptq.nn_modules", "auto_gptq.nn_modules.qlinear"):
        stand_in(name, folder / name.replace(".", "/"))
    from auto_gptq.nn_modules.qlinear.qlinear_cuda import QuantLinear  # type: ignore[import-not-found]

    def pack(weight: torch.Tensor) -> Packed:
        n, k = weight.shape
        linear = torch.nn.Linear(k, n, bias=False)
        linear.weight.data = weight.clone()
        scale, zero = steps(weight, GROUP, symmetric=symmetric, bits=bits)
        groups = torch.arange(k) // GROUP
        if not in_order:
            groups = groups[torch.randperm(k, generator=torch.Generator().manual_seed(3))]
        packed = QuantLinear(bits, GROUP, k, n, bias=False)
        packed.pack(linear, scale, zero, groups.int())
        tensors = {name: getattr(packed, name) for name in ("qweight", "qzeros", "scales", "g_idx")}
        return tensors, packed(torch.eye(k)).float().T

    return pack


def compressed(
    folder: Path, *, kind: str, bits: int, strategy: str, symmetric: bool
) -> Callable[[torch.Tensor], Packed]:
    sys.path.insert(0, str(folder))
    from compressed_tensors.compressors import BaseCompressor  # type: ignore[import-not-found]
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # type: ignore[import-not-found]

    form = {("int", 4): "pack-quantized", ("int", 8): "int-quantized", ("float", 8): "float-quantized"}[kind, bits]

    def pack(weight: torch.Tensor) -> Packed:
        group = GROUP if strategy == "group" else None
        block = list(BLOCK) if strategy == "block" else None
        args = QuantizationArgs(
            num_bits=bits, type=kind, strategy=strategy, group_size=group, block_structure=block, symmetric=symmetric
        )
        scheme = QuantizationScheme(targets=["Linear"], weights=args)
        if block is None:
            scale, zero = steps(weight, group or weight.shape[1], symmetric=symmetric, bits=bits)
        else:
            bands = torch.split(weight, BLOCK[0])
            rows = [[part.abs().amax() for part in torch.split(band, BLOCK[1], 1)] for band in bands]
            scale = torch.stack([torch.stack(row) for row in rows])
            scale, zero = scale / 127, torch.zeros_like(scale)
        if kind == "float":
            scale, zero = scale * 127 / 448, torch.zeros_like(scale)
        given = {"weight": weight, "weight_scale": scale, "weight_zero_point": (zero - 2 ** (bits - 1)).to(torch.int8)}
        if symmetric:
            given.pop("weight_zero_point")
        compressor = BaseCompressor.get_value_from_registry(form)
        tensors = compressor.compress(given, scheme)
        return tensors, compressor.decompress(dict(tensors), scheme)["weight"].float()

    return pack


def make(name: str, config: dict[str, object], pack: Callable[[torch.Tensor], Packed]) -> None:
    path = make_model(FOLDER / name, SHAPE)
    tensors, expected = load_file(path / "model.safetensors"), {}
    for tensor in sorted(each for each in tensors if "proj" in each):
        packed, meant = pack(tensors.pop(tensor))
        module = tensor.removesuffix(".weight")
        tensors |= {f"{module}.{leaf}": value.contiguous() for leaf, value in packed.items()}
        expected[tensor] = meant @ probes(meant.shape[1])
    tensors = {
        key: value.half() if value.dtype == torch.float32 and "scale" not in key else value
        for key, value in tensors.items()
    }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    save_file(expected, path / "expected.safetensors")
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "quantization_config": config}, indent=1) + "\n")
    for extra in ("generation_config.json", "tokenizer.json"):
        (path / extra).unlink(missing_ok=True)


def groups(kind: str, bits: int, strategy: str, symmetric: bool, **more: object) -> dict[str, object]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": symmetric, "group_size": None}
    if strategy == "group":
        weights["group_size"] = GROUP
    if strategy == "block":
        weights["block_structure"] = list(BLOCK)
    return {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None, **more}}


def main() -> None:
    awq_folder, gptq_folder, compressed_folder = map(Path, sys.argv[1:])
    make(
        "awq",
        {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
        awq(awq_folder),
    )
    for bits, in_order, symmetric in ((4, True, True), (4, False, False), (8, True, False)):
        config = {"quant_method": "gptq", "bits": bits, "group_size": GROUP, "sym": symmetric, "desc_act": not in_order}
        name = f"gptq-{bits}" + ("" if in_order else "-act-order")
        make(name, config, gptq(gptq_folder, bits=bits, in_order=in_order, symmetric=symmetric))
    for name, kind, bits, strategy, symmetric in (
        ("w4a16", "int", 4, "group", True),
        ("w4a16-asymmetric", "int", 4, "group", False),
        ("w8a16", "int", 8, "channel", True),
        ("fp8", "float", 8, "channel", True),
        ("fp8-block", "float", 8, "block", True),
    ):
        form = {("int", 4): "pack-quantized", ("int", 8): "int-quantized"}.get((kind, bits), "float-quantized")
        config = {
            "quant_method": "compressed-tensors",
            "format": form,
            "config_groups": groups(kind, bits, strategy, symmetric),
            "ignore": ["lm_head"],
        }
        pack = compressed(compressed_folder, kind=kind, bits=bits, strategy=strategy, symmetric=symmetric)
        make(name, config, pack)


if __name__ == "__main__":
    main()
