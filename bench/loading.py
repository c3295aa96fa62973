"""Loading a model: Baton against reading its files into fresh memory, and against transformers' `from_pretrained`.

    python -m bench.loading [--shape 1b] [--dtype bfloat16] [--repeats 3] [--cold] [--folder DIR] [--json FILE]

Writes a Llama of that shape with random bfloat16 weights, in shards of 1 GiB, into a folder that is removed afterwards.
Each way loads it in a process of its own, in turn. Seconds are those of loading alone, without imports. CPU
seconds, the system's included, tell more on a machine that others use. Memory is the most anonymous memory that loading
added, beside what the weights take in that dtype. The page cache is warm: the files were just written, so what is
measured is copying and packing, not the disk. With `--cold` the files leave the page cache before each load, and `dd`
of them stands beside the others.

`huge` is `readinto` into memory of huge pages, as the kernels' weights have it.

A virtual machine's host may give memory only when it is touched, and take it back seconds after it became free: the
first touch of a gigabyte took 0.1 s or 1.5 s by that alone. So each way begins right after its process has touched all
free memory and let go of it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.local.host_memory import available_bytes

SHAPES: dict[str, dict[str, int]] = {
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
}
KV_HEADS = {"135m": 3, "1b": 8, "8b": 8}
VOCAB_SIZE = {"135m": 49152, "1b": 128256, "8b": 128256}
SHARD_BYTES = 1 << 30
WAYS = ("readinto", "huge", "baton", "transformers")
SPARE_BYTES = 1 << 30  # beside 1.1 times the weights: imports, and what the system needs

# Prints the seconds of one way, its CPU seconds, and the most anonymous memory that it added, in bytes.
CHILD = """
import mmap, os, subprocess, sys, threading, time
from pathlib import Path

way, folder, dtype = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
import torch
torch.set_num_threads(int(sys.argv[4]))
if way == "baton":
    from common.config import EngineSettings
    from engine.local.device import LocalDevice
    from transformers import LlamaConfig  # by which the runner reads config.json
if way == "transformers":
    from transformers import AutoModelForCausalLM, LlamaForCausalLM

def bytes_of(file, name):
    (line,) = [line for line in open(file) if line.startswith(name)]
    return int(line.split()[1]) * 1024

def touch_free_memory():
    num_bytes = max(bytes_of("/proc/meminfo", "MemFree") - (1 << 30), 1 << 20)
    with mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, num_bytes, mmap.PAGESIZE):
            memory[at] = 1

def anonymous():
    return bytes_of("/proc/self/status", "RssAnon")

def watch():
    while not done.wait(0.005):
        peaks.append(anonymous())

touch_free_memory()
before, peaks, done = anonymous(), [0], threading.Event()
thread = threading.Thread(target=watch)
thread.start()
start, cpu_start = time.perf_counter(), sum(os.times()[:4])
kept, files = [], sorted(folder.glob("*.safetensors"))
if way == "dd":
    for file in files:
        subprocess.run(["dd", f"if={file}", "of=/dev/null", "bs=4M", "status=none"], check=True)
elif way in ("readinto", "huge"):
    for file in files:
        with file.open("rb", buffering=0) as stream:
            if way == "huge":
                memory = mmap.mmap(-1, file.stat().st_size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                memory.madvise(mmap.MADV_HUGEPAGE)
            else:
                memory = bytearray(file.stat().st_size)
            view, at = memoryview(memory), 0
            while at < len(memory):
                at += stream.readinto(view[at:])
            kept.append(memory)
elif way == "baton":
    settings = {"device": "cpu", "dtype": dtype, "num_blocks": 16, "max_model_len": 256}
    settings["num_threads"] = int(sys.argv[4])
    kept.append(LocalDevice(folder, EngineSettings.model_validate(settings)))
else:
    kept.append(AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True))
seconds, cpu_seconds = time.perf_counter() - start, sum(os.times()[:4]) - cpu_start
done.set()
thread.join()
print(seconds, cpu_seconds, max(peaks) - before)
"""


def tensors_of(shape: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a checkpoint's tensors, by name."""
    sizes = SHAPES[shape]
    hidden, inner, heads = sizes["hidden_size"], sizes["intermediate_size"], sizes["num_attention_heads"]
    kv_size = KV_HEADS[shape] * hidden // heads
    tensors: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB_SIZE[shape], hidden),
        "model.norm.weight": (hidden,),
    }
    if shape == "8b":
        tensors["lm_head.weight"] = (VOCAB_SIZE[shape], hidden)
    for layer in range(sizes["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        tensors |= {f"{at}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        tensors |= {f"{at}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qo"}
        tensors |= {f"{at}.self_attn.{name}_proj.weight": (kv_size, hidden) for name in "kv"}
        tensors |= {f"{at}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
        tensors[f"{at}.mlp.down_proj.weight"] = (hidden, inner)
    return tensors


def write_model(folder: Path, shape: str) -> None:
    """A checkpoint in shards, its weights random."""
    tensors = tensors_of(shape)
    config = {
        **SHAPES[shape],
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE[shape],
        "num_key_value_heads": KV_HEADS[shape],
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": shape != "8b",
        "dtype": "bfloat16",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    shards: list[list[str]] = [[]]
    size = 0
    for name, each in tensors.items():
        num_bytes = 2 * torch.Size(each).numel()
        if size and size + num_bytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards):
        file = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        random = {name: torch.empty(tensors[name], dtype=torch.bfloat16).normal_(0, 0.02) for name in names}
        save_file(random, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def load(way: str, folder: Path, dtype: str, threads: int) -> tuple[float, float, float]:
    """Seconds, CPU seconds, and bytes of anonymous memory, in a fresh process."""
    command = [sys.executable, "-c", CHILD, way, str(folder), dtype, str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{way} failed: {done.stderr[-2000:]}")
    seconds, cpu_seconds, num_bytes = map(float, done.stdout.split()[-3:])
    return seconds, cpu_seconds, num_bytes


def refusal(folder: Path, file_bytes: int, weight_bytes: int) -> str:
    """Why the bench cannot run here; empty if it can."""
    free, needed = shutil.disk_usage(folder).free, int(weight_bytes * 1.1) + SPARE_BYTES
    if free < file_bytes:
        return f"{folder} has {free / 1e9:.1f} GB free, the files need {file_bytes / 1e9:.1f} GB; set --folder"
    available = available_bytes()
    if available is not None and available < needed:
        return f"{available / 1e9:.1f} GB of memory are available, loading needs {needed / 1e9:.1f} GB"
    return ""


def forget(folder: Path) -> None:
    """Has the files leave the page cache, to which they are written for good first."""
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.loading", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="1b")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--cold", action="store_true", help="empty the page cache of the files before each load")
    parser.add_argument("--folder", type=Path, help="where the model is written; a temporary folder if unset")
    parser.add_argument("--json", type=Path, help="write the results here")
    args = parser.parse_args()
    ways = ("dd", *WAYS) if args.cold else WAYS
    num_weights = sum(torch.Size(each).numel() for each in tensors_of(args.shape).values())
    weight_bytes = num_weights * (2 if args.dtype == "bfloat16" else 4)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        if reason := refusal(folder, 2 * num_weights, weight_bytes):
            parser.error(f"--shape {args.shape} in {args.dtype}: {reason}")
        write_model(folder, args.shape)
        runs: dict[str, list[tuple[float, float, float]]] = {way: [] for way in ways}
        for _ in range(args.repeats):
            for way in ways:
                if args.cold:
                    forget(folder)
                runs[way].append(load(way, folder, args.dtype, args.threads))
    results = {
        way: {
            "seconds": statistics.median(seconds for seconds, _, _ in each),
            "cpu_seconds": statistics.median(seconds for _, seconds, _ in each),
            "peak_anonymous_bytes": max(num_bytes for _, _, num_bytes in each),
        }
        for way, each in runs.items()
    }
    print(f"{args.shape}: {num_weights / 1e9:.2f} G weights, {weight_bytes / 1e9:.2f} GB in {args.dtype}, medians")
    for way, measured in results.items():
        share = measured["peak_anonymous_bytes"] / weight_bytes
        times, cpu_times = (measured[kind] / results["readinto"][kind] for kind in ("seconds", "cpu_seconds"))
        print(
            f"{way:>12}: {measured['seconds']:7.2f} s, {times:5.2f} x readinto, "
            f"{measured['cpu_seconds']:7.2f} s of CPU, {cpu_times:5.2f} x, "
            f"anonymous memory {measured['peak_anonymous_bytes'] / 1e9:.2f} GB = {share:.2f} x the weights"
        )
    if args.cold:
        print(f"baton reads {results['dd']['seconds'] / results['baton']['seconds']:.2f} times as fast as dd")
    if args.json:
        result = {"shape": args.shape, "dtype": args.dtype, "weight_bytes": weight_bytes, "ways": results}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
