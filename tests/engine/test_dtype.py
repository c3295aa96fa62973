"""What `--dtype auto` takes on which CPU."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from common.cpu import Cpu, read_cpu
from common.model_files import checkpoint_dtype, open_model
from engine.kernels.choice import Choice
from engine.loading.dtype import DtypeChoice, choose_dtype, fast_dtypes, resolve_dtype

ZEN3 = "fpu sse4_2 fma avx avx2"
ICE_LAKE = f"{ZEN3} avx512f avx512bw avx512_vnni"
ZEN4 = f"{ICE_LAKE} avx512_bf16"
SAPPHIRE_RAPIDS = f"{ZEN4} avx512_fp16 amx_tile amx_int8 amx_bf16"
CPUS = {"Zen 3": ZEN3, "Ice Lake": ICE_LAKE, "Zen 4": ZEN4, "Sapphire Rapids": SAPPHIRE_RAPIDS}

BF16 = ("Zen 4", "Sapphire Rapids")
FAST = {name: {"float32"} | ({"bfloat16"} if name in BF16 else set()) for name in CPUS}
FAST["Sapphire Rapids"].add("float16")

NO_KERNELS = Choice("torch", "--kernels torch")
KERNELS = Choice("avx2", "the best that this CPU has")


def cpu(folder: Path, flags: str | None, **environ: str) -> Cpu:
    """As read from a file like Linux's, of two cores; without one if there are no flags."""
    file = folder / "cpuinfo"
    if flags is not None:
        file.write_text(f"processor\t: 0\nmodel name\t: A CPU @ 2 GHz\nflags\t\t: {flags}\n\n" * 2)
    return read_cpu(file, environ)


@pytest.mark.parametrize("name", CPUS)
def test_flags_say_what_is_fast(name: str, tmp_path: Path) -> None:
    read = cpu(tmp_path, CPUS[name])
    assert (read.name, read.limits) == ("A CPU @ 2 GHz", ())
    assert fast_dtypes(read, NO_KERNELS) == FAST[name]
    assert fast_dtypes(read, KERNELS) == {"float32", "bfloat16"}  # they have nothing for float16


@pytest.mark.parametrize(
    ("variable", "value", "fast"),
    [
        ("ONEDNN_MAX_CPU_ISA", "AVX2", {"float32"}),
        ("ONEDNN_MAX_CPU_ISA", "avx512_core", {"float32"}),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_VNNI", {"float32"}),
        ("DNNL_MAX_CPU_ISA", "AVX2", {"float32"}),  # the name of old
        ("ATEN_CPU_CAPABILITY", "avx2", {"float32"}),
        ("ATEN_CPU_CAPABILITY", "default", {"float32"}),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", {"float32", "bfloat16"}),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16", {"float32", "bfloat16", "float16"}),
        ("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX", {"float32", "bfloat16", "float16"}),
        ("ONEDNN_MAX_CPU_ISA", "ALL", {"float32", "bfloat16", "float16"}),
        ("ATEN_CPU_CAPABILITY", "avx512", {"float32", "bfloat16", "float16"}),
        ("OMP_NUM_THREADS", "AVX2", {"float32", "bfloat16", "float16"}),
    ],
)
def test_variables_take_flags_away(variable: str, value: str, fast: set[str], tmp_path: Path) -> None:
    read = cpu(tmp_path, SAPPHIRE_RAPIDS, **{variable: value})
    assert fast_dtypes(read, NO_KERNELS) == fast
    takes_some = "float16" not in fast or value == "AVX512_CORE_FP16"
    assert read.limits == ((f"{variable}={value}",) if takes_some else ())


def test_a_variable_that_takes_nothing_away_is_not_named(tmp_path: Path) -> None:
    assert cpu(tmp_path, ZEN3, ONEDNN_MAX_CPU_ISA="AVX2", ATEN_CPU_CAPABILITY="avx2").limits == ()


def test_arm(tmp_path: Path) -> None:
    """Its cores may be unlike: a thread may run on any. The variables mean nothing there."""
    file = tmp_path / "cpuinfo"
    big, little = "Features\t: fp asimd asimdhp bf16 i8mm\n", "Features\t: fp asimd asimdhp\n"
    file.write_text(big * 2)
    assert fast_dtypes(read_cpu(file, {"ONEDNN_MAX_CPU_ISA": "AVX2"}), NO_KERNELS) == {"float32", "bfloat16", "float16"}
    file.write_text(big + little)
    assert fast_dtypes(read_cpu(file, {}), NO_KERNELS) == {"float32", "float16"}


def test_not_linux(tmp_path: Path) -> None:
    read = cpu(tmp_path, None)
    assert read == Cpu("", frozenset())
    assert fast_dtypes(read, NO_KERNELS) == {"float32"}


# ------------------------------------------------------------------------------------------------ the choice


@pytest.mark.parametrize("name", CPUS)
@pytest.mark.parametrize("checkpoint", ["bfloat16", "float32", "float16"])
def test_auto(checkpoint: str, name: str, tmp_path: Path) -> None:
    """The checkpoint's own if it is fast; on a CUDA device always."""
    here = cpu(tmp_path, CPUS[name])
    chosen = choose_dtype("auto", checkpoint=checkpoint, device="cpu", cpu=here, kernels=NO_KERNELS)
    if checkpoint in FAST[name]:
        assert chosen == DtypeChoice(checkpoint, "the checkpoint's own")
    else:
        assert (chosen.dtype, chosen.is_checkpoint_slow) == ("float32", True)
        assert f"the checkpoint's {checkpoint} is slow here: this CPU has no" in chosen.reason
    on_device = choose_dtype("auto", checkpoint=checkpoint, device="cuda:1", cpu=here, kernels=NO_KERNELS)
    assert on_device.dtype == checkpoint
    native = choose_dtype("auto", checkpoint=checkpoint, device="cpu", cpu=here, kernels=KERNELS)
    assert native.dtype == ("bfloat16" if checkpoint == "bfloat16" else "float32")


def test_reasons(tmp_path: Path) -> None:
    def reason(asked: str, flags: str, **environ: str) -> str:
        here = cpu(tmp_path, flags, **environ)
        return choose_dtype(asked, checkpoint="bfloat16", device="cpu", cpu=here, kernels=NO_KERNELS).reason

    slow = (
        "the checkpoint's bfloat16 is slow here: this CPU has no bfloat16 units (avx512_bf16 or amx_bf16), "
        "and the CPU kernels are not used: --kernels torch"
    )
    hidden = (
        "the checkpoint's bfloat16 is slow here: ONEDNN_MAX_CPU_ISA=AVX2 and ATEN_CPU_CAPABILITY=avx2 "
        "take this CPU's bfloat16 units away, and the CPU kernels are not used: --kernels torch"
    )
    assert reason("auto", ZEN3) == slow
    assert reason("float32", ZEN3) == slow  # what `baton up` chose for its workers
    assert reason("bfloat16", ZEN3) == f"as set; auto would be float32: {slow}"
    assert reason("auto", ZEN4, ONEDNN_MAX_CPU_ISA="AVX2", ATEN_CPU_CAPABILITY="avx2") == hidden
    assert reason("bfloat16", ZEN4) == "the checkpoint's own"
    assert reason("float32", ZEN4) == "as set; auto would be bfloat16: the checkpoint's own"


def write_model(folder: Path, config: dict[str, object], *tensors: str) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    header = {f"t{i}": {"dtype": dtype, "shape": [0], "data_offsets": [0, 0]} for i, dtype in enumerate(tensors)}
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    return folder


@pytest.mark.parametrize(
    ("config", "tensors", "dtype"),
    [
        ({"dtype": "bfloat16"}, ("F32",), "bfloat16"),
        ({"torch_dtype": "float16"}, ("F32",), "float16"),
        ({"torch_dtype": "torch.bfloat16"}, (), "bfloat16"),
        ({"dtype": None}, ("I64", "BF16", "F32"), "bfloat16"),
        ({"dtype": "auto"}, ("F16",), "float16"),
        ({"dtype": "float64"}, ("F64",), "float32"),
        ({}, (), "float32"),
    ],
)
def test_the_checkpoints_own(config: dict[str, object], tensors: tuple[str, ...], dtype: str, tmp_path: Path) -> None:
    model = write_model(tmp_path, config, *tensors)
    assert checkpoint_dtype(open_model(model)) == dtype
    assert resolve_dtype("auto", model, "cuda").dtype == dtype


def test_it_needs_no_torch(tmp_path: Path) -> None:
    """So `baton up` can resolve it, which starts in a moment."""
    model = write_model(tmp_path, {"dtype": "float16"})
    script = (
        "import sys, pathlib; from engine.loading.dtype import resolve_dtype; "
        f"print(resolve_dtype('auto', pathlib.Path({str(model)!r}), 'cuda').dtype, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["float16", "False"]
