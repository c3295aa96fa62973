"""What `baton up` would find on this machine, and what to do about what is missing.

Each check yields one finding as soon as it is known. A check never raises for what it looks at: that is its finding.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import torch

from baton.doctor import cluster_check
from baton.doctor.speed import ROWS, SIZE, measure_cpu
from baton.doctor.tuning import GAIN, measure_products, rules_of
from baton.stack import lmcache_server
from baton.stack.kv_directory import private_parent
from baton.stack.stack_plan import usable_cores
from common.config import DEFAULT_MODEL, UpSettings
from common.cpu import read_cpu, read_limits
from common.errors import BatonError
from common.model_files import checkpoint_dtype, open_model
from engine.kernels.choice import AUTO, TORCH, Choice, built_variants, choose, cpu_instruction_sets
from engine.kernels.library import DTYPES, choose_kernels
from engine.kernels.table import Rule, Table, Tuned, load_table, shipped, tuned_file, write_tuned
from engine.loading.dtype import DtypeChoice, choose_dtype, resolve_dtype
from engine.loading.embedded_model import ORIGINAL_DTYPE, find_model, is_embedded
from engine.loading.hub import is_hub_name
from engine.loading.weights import check_files
from engine.local.device_choice import DeviceChoice, choose_device
from engine.local.host_memory import available_bytes
from engine.local.loading import QUANTIZED_BYTES
from engine.local.memory import weight_bytes
from kv_store import registry

GIB = 1 << 30


class Level(StrEnum):
    OK = "ok"
    HINT = "hint"  # works, and could do better
    PROBLEM = "problem"  # `baton up` with these settings would fail


@dataclass(slots=True, frozen=True)
class Finding:
    name: str  # of the check
    level: Level
    text: str
    advice: str = ""  # what to do; empty if there is nothing to do
    facts: dict[str, object] = field(default_factory=dict)  # the same as values, for programs


def examine(settings: UpSettings, *, tune: bool = False) -> Iterator[Finding]:
    """All findings, in the order in which they are read. `settings` are those of `baton up`. `tune` measures products
    and writes what the engines then compute them with."""
    cores = settings.cpu_cores or usable_cores()
    num_threads = len(cores) or os.cpu_count() or 1
    torch.set_num_threads(num_threads)
    yield _cpu(num_threads)
    device, device_finding = _device(settings)
    kernels, table, finding = _kernels(settings, device, will_tune=tune)
    yield finding
    yield device_finding
    model, finding = _model(settings)
    yield finding
    dtype, finding = _dtype(settings, model, device, kernels)
    yield finding
    yield from _quantization(settings, device, dtype, kernels)
    yield from _speed(settings, kernels, dtype, model, num_threads, None if tune else table)
    if tune:
        yield _tune(settings, kernels, num_threads)
    yield from _connectors(settings)
    yield _cluster()
    yield _port(settings.host, settings.http_port, "http_port", "--http-port")
    yield _port(settings.host, settings.grpc_port, "grpc_port", "--grpc-port")


def _cpu(num_threads: int) -> Finding:
    cpu, sets = read_cpu(), cpu_instruction_sets()
    limits = [limit.setting for limit in read_limits()]
    available = available_bytes()
    memory = "" if available is None else f", {available / GIB:.1f} GiB of memory available"
    facts: dict[str, object] = {
        "name": cpu.name,
        "num_cores": num_threads,
        "instruction_sets": sets,
        "limits": limits,
        "available_memory_bytes": available,
    }
    text = f"{cpu.name or 'unknown'}, {num_threads} cores ({', '.join(sets) or 'no instruction set known'}){memory}"
    if limits:
        return Finding("cpu", Level.HINT, text, f"{' and '.join(limits)} keeps a part of it unused: unset it", facts)
    return Finding("cpu", Level.OK, text, facts=facts)


def _kernels(settings: UpSettings, device: DeviceChoice, *, will_tune: bool) -> tuple[Choice, Table, Finding]:
    """The table is what engines on this CPU read."""
    try:
        choice = choose(settings.kernels)
    except BatonError as error:
        fallback = choose(AUTO)
        advice = f"--kernels {fallback.instruction_set}"
        return fallback, shipped(TORCH), Finding("kernels", Level.PROBLEM, error.message, advice)
    facts: dict[str, object] = {"kernels": choice.instruction_set, "reason": choice.reason, "built": built_variants()}
    text, table = f"{choice.instruction_set}: {choice.reason}", shipped(choice.instruction_set)
    try:
        asked = torch.float32 if settings.dtype == AUTO else getattr(torch, settings.dtype)  # auto has kernels, too
        used = choose_kernels(settings.kernels, device=torch.device(device.device), dtype=asked)
    except BatonError as error:
        return choice, table, Finding("kernels", Level.PROBLEM, error.message, "--kernels auto; or --device cpu", facts)
    if TORCH not in (choice.instruction_set, used.instruction_set) and not will_tune:  # which writes the table anew
        try:
            table = load_table(settings.cache_dir, read_cpu().name, choice.instruction_set)
        except BatonError as error:
            file = tuned_file(settings.cache_dir)
            advice = f"delete {file}, or run baton doctor --tune again"
            return choice, table, Finding("kernels", Level.PROBLEM, error.message.partition(";")[0], advice, facts)
    if table.file:
        facts["tuned_in"] = table.file
        text += f"; tuned for this CPU: {_describe(table.rules)} ({table.file})"
    if choice.instruction_set != TORCH or settings.kernels == TORCH:
        return choice, table, Finding("kernels", Level.OK, text, facts=facts)
    return choice, table, Finding("kernels", Level.HINT, text, _kernels_advice(), facts)


def _kernels_advice() -> str:
    """What lets kernels run if `auto` means torch."""
    has, built = cpu_instruction_sets(), built_variants()
    if not built:
        return "install g++ or clang++, then `python -m engine.kernels.build` (or make install)"
    if not has:
        return "use a CPU with AVX2 and FMA, or a 64-bit Arm: those run the kernels"
    if not any(Choice(name, "").variant in built for name in has):
        return f"`python -m engine.kernels.build` here builds {', '.join(has)}; there is {', '.join(built)} only"
    return f"unset {' and '.join(limit.setting for limit in read_limits())}, which forbids them"


def _device(settings: UpSettings) -> tuple[DeviceChoice, Finding]:
    choice = choose_device(settings.device)
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    facts: dict[str, object] = {"device": choice.device, "reason": choice.reason, "cuda_devices": names}
    text = f"{choice.device}: {choice.reason}" + (f" ({', '.join(names)})" if names else "")
    if choice.device.startswith("cuda") and not names:
        return choice, Finding("device", Level.PROBLEM, f"{text}, but torch sees none", "--device cpu", facts)
    is_unused = settings.device == AUTO and choice.is_cuda_unusable
    advice = "install a torch that is built for this driver's CUDA" if is_unused else ""
    return choice, Finding("device", Level.HINT if is_unused else Level.OK, text, advice, facts)


def _model(settings: UpSettings) -> tuple[Path | None, Finding]:
    facts: dict[str, object]
    try:
        path = find_model(settings.model, settings.cache_dir)
        if path is None:
            if is_hub_name(settings.model):
                text, advice = f"{settings.model} is not in the hub's cache", "the first `baton up` downloads it"
            else:
                text = f"{settings.model} is not converted yet into {settings.cache_dir}"
                advice = "the first `baton up` does so, in some seconds"
            return None, Finding("model", Level.HINT, text, advice, {"model": settings.model, "path": None})
        files = open_model(path)
        num_bytes = sum(file.stat().st_size for file in files.weight_files)
        check_files(files)
    except BatonError as error:
        facts = {"model": settings.model, "path": None}
        return None, Finding("model", Level.PROBLEM, error.message, _model_advice(settings), facts)
    facts = {"model": settings.model, "path": str(path), "weight_file_bytes": num_bytes}
    return path, Finding("model", Level.OK, f"{path} ({num_bytes / GIB:.2f} GiB of weights)", facts=facts)


def _model_advice(settings: UpSettings) -> str:
    if Path(settings.model).expanduser().exists():
        return "download or copy it again, whole; or --model with another one (docs/models.md lists what is served)"
    return f"--model DIR, FILE.gguf or ORG/NAME of a hub; or --model {DEFAULT_MODEL}, which needs no download"


def _dtype(
    settings: UpSettings, model: Path | None, device: DeviceChoice, kernels: Choice
) -> tuple[DtypeChoice, Finding]:
    if model is not None:
        dtype = resolve_dtype(settings.dtype, model, device.device, kernels.instruction_set)
        checkpoint = checkpoint_dtype(open_model(model))
    elif is_embedded(settings.model):
        checkpoint = ORIGINAL_DTYPE
        dtype = choose_dtype(
            settings.dtype, checkpoint=checkpoint, device=device.device, cpu=read_cpu(), kernels=kernels
        )
    else:
        dtype = DtypeChoice("float32" if settings.dtype == AUTO else settings.dtype, "no model to ask")
        return dtype, Finding("dtype", Level.OK, f"{dtype.dtype}: {dtype.reason}", facts={"dtype": dtype.dtype})
    facts: dict[str, object] = {"dtype": dtype.dtype, "reason": dtype.reason}
    text = f"{dtype.dtype}: {dtype.reason}"
    if not dtype.is_checkpoint_slow:
        return dtype, Finding("dtype", Level.OK, text, facts=facts)
    return dtype, Finding("dtype", Level.HINT, text, _dtype_advice(dtype, checkpoint), facts)


def _dtype_advice(dtype: DtypeChoice, checkpoint: str) -> str:
    """What to do if this CPU is slow in the checkpoint's dtype."""
    if dtype.dtype == checkpoint:
        return "--dtype auto takes float32, which is faster here"
    everywhere = "if other workers' machines differ, give all of them --dtype float32"
    if checkpoint == "bfloat16":
        return f"let the CPU kernels run (see kernels), which are fast in it; {everywhere}"
    return f"float32 takes twice the memory; --dtype bfloat16 does not, but rounds; {everywhere}"


def _quantization(settings: UpSettings, device: DeviceChoice, dtype: DtypeChoice, kernels: Choice) -> Iterator[Finding]:
    """Whether workers would start with it. Nothing if nothing is to be quantised. `kernels`: those that take the place
    of ones that cannot run here."""
    kind, name = settings.quantization, "quantization"
    if kind == "none":
        return
    facts: dict[str, object] = {"quantization": kind}
    try:
        choose_kernels(
            settings.kernels if settings.kernels in (AUTO, TORCH) else kernels.instruction_set,
            device=torch.device(device.device),
            dtype=getattr(torch, dtype.dtype),
            quantization=kind,
        )
    except BatonError as error:
        if not device.device.startswith("cpu"):
            wanted = "--device cpu"
        elif getattr(torch, dtype.dtype) not in DTYPES:
            wanted = "--dtype float32"
        else:
            wanted = "--kernels auto" if settings.kernels != AUTO else _kernels_advice()
        yield Finding(name, Level.PROBLEM, error.message, f"take --quantization away; or {wanted}", facts)
    else:
        yield Finding(name, Level.OK, f"weights in {kind}", facts=facts)


def _decode_bytes(model: Path, dtype: DtypeChoice, quantization: str) -> float:
    """Of weights, that a step reads."""
    files, size = open_model(model), QUANTIZED_BYTES.get(quantization)
    if size is not None:
        return size * weight_bytes(files, 1, stays_quantised=False)
    return weight_bytes(files, getattr(torch, dtype.dtype).itemsize)


def _speed(
    settings: UpSettings,
    kernels: Choice,
    dtype: DtypeChoice,
    model: Path | None,
    num_threads: int,
    table: Table | None,
) -> Iterator[Finding]:
    """`table`: by which engines choose what multiplies; None if it is about to be measured."""
    speed = measure_cpu(kernels, dtype.dtype, num_threads)
    facts: dict[str, object] = {"read_gb_s": round(speed.read_gb_s, 2)}
    text = f"{speed.read_gb_s:.1f} GB/s read"
    if model is not None:
        most = speed.read_gb_s * 1e9 / _decode_bytes(model, dtype, settings.quantization)
        facts["max_decode_tokens_s"] = round(most, 1)
        text += f": weights let one stream decode {most:.0f} tokens/s on the CPU at most"
    yield Finding("bandwidth", Level.OK, text, facts=facts)
    facts = {"dtype": dtype.dtype, "torch_gflop_s": round(speed.torch_gflop_s, 1), "kernels_gflop_s": None}
    text = f"{speed.torch_gflop_s:.0f} GFLOP/s in {dtype.dtype} with torch"
    if speed.kernels_gflop_s is None:
        yield Finding("products", Level.OK, text, facts=facts)
        return
    facts["kernels_gflop_s"] = round(speed.kernels_gflop_s, 1)
    text = f"{speed.kernels_gflop_s:.0f} GFLOP/s in {dtype.dtype} with {kernels.instruction_set}, {text}"
    torch_from = None if table is None else table.torch_from(dtype.dtype, SIZE * SIZE)
    is_torch_used = table is None or (torch_from is not None and torch_from <= ROWS)
    if is_torch_used or settings.quantization != "none" or speed.torch_gflop_s < GAIN * speed.kernels_gflop_s:
        yield Finding("products", Level.OK, text, facts=facts)
    else:
        advice = "baton doctor --tune finds where torch is faster, and engines take it there"
        yield Finding("products", Level.HINT, text, advice, facts)


def _tune(settings: UpSettings, kernels: Choice, num_threads: int) -> Finding:
    if kernels.instruction_set == TORCH:
        return Finding("tune", Level.HINT, f"nothing to choose: torch computes everything ({kernels.reason})")
    measured = list(measure_products(kernels, num_threads))
    rules = rules_of(measured)
    file = tuned_file(settings.cache_dir)
    facts: dict[str, object] = {
        "file": str(file),
        "rules": [dataclasses.asdict(one) for one in rules],
        "products": [dataclasses.asdict(one) for one in measured],
    }
    try:
        write_tuned(file, Tuned(read_cpu().name, kernels.instruction_set, rules))
    except OSError as error:
        return Finding("tune", Level.PROBLEM, f"{file}: {error.strerror}", "--cache-dir DIR", facts)
    return Finding("tune", Level.OK, f"{_describe(rules)} (engines read {file})", facts=facts)


def _describe(rules: Sequence[Rule]) -> str:
    parts = []
    for rule in rules:
        size = f" if a matrix has {rule.min_weights:,} weights or more" if rule.min_weights else ""
        which = f"with torch from {rule.torch_from} tokens on" if rule.torch_from is not None else "with the kernels"
        parts.append(f"{rule.dtype} {which}{size}")
    return "; ".join(parts)


def _connectors(settings: UpSettings) -> Iterator[Finding]:
    used = {settings.connector, settings.store}
    yield _shared_storage(settings)
    yield _nixl("nixl" in used)
    yield _lmcache("lmcache" in used)


def _shared_storage(settings: UpSettings) -> Finding:
    given = getattr(settings, "kv_dir", None)
    folder = Path(given) if given else private_parent()
    existing = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    free = shutil.disk_usage(existing).free
    facts: dict[str, object] = {"folder": str(folder), "free_bytes": free}
    text = f"KV files in {folder}, {free / GIB:.1f} GiB free"
    if not os.access(existing, os.W_OK):
        return Finding("shared_storage", Level.PROBLEM, f"{text}, and not writable", "--kv-dir DIR", facts)
    if free < GIB:
        return Finding("shared_storage", Level.HINT, text, "--kv-dir on a file system with more room", facts)
    return Finding("shared_storage", Level.OK, text, facts=facts)


def _nixl(is_used: bool) -> Finding:
    try:
        found = registry.nixl_backends()
    except BatonError as error:
        level = Level.PROBLEM if is_used else Level.HINT
        return Finding("nixl", level, error.message, "pip install 'baton-serve[nixl]'", {"backends": []})
    version = next((_version(name) for name in ("nixl-cu13", "nixl-cu12", "nixl") if _version(name)), "")
    facts: dict[str, object] = {"version": version, "backends": found}
    text = f"NIXL {version} with backends {', '.join(found)}"
    if "UCX" not in found:
        level = Level.PROBLEM if is_used else Level.HINT
        return Finding("nixl", level, text, "Baton needs UCX: install NIXL's wheel with it", facts)
    return Finding("nixl", Level.OK, text, facts=facts)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _lmcache(is_used: bool) -> Finding:
    try:
        path = lmcache_server.executable()
    except BatonError:
        level = Level.PROBLEM if is_used else Level.HINT
        return Finding("lmcache", level, "LMCache is not installed", "make lmcache", {"executable": None})
    return Finding("lmcache", Level.OK, str(path), facts={"executable": str(path)})


def _cluster() -> Finding:
    """Nobody needs a cluster for `baton up`, so the worst is a hint."""
    found = cluster_check.look()
    facts: dict[str, object] = {
        "access": found.access,
        "namespace": found.namespace,
        "version": found.version,
        "allowed": [str(right) for right in found.allowed],
        "missing": [str(right) for right in found.missing],
    }
    if not found.access:
        text = "no access is configured: KUBECONFIG is unset, there is no ~/.kube/config, and this is no pod"
        return Finding("cluster", Level.OK, text, facts=facts)
    if found.error:
        advice = "only for Kubernetes: set KUBECONFIG to a file whose cluster is up, and see `kubectl version`"
        return Finding("cluster", Level.HINT, f"{found.access}: {found.error}", advice, facts)
    text = f"Kubernetes {found.version} by {found.access}, namespace {found.namespace}"
    if found.missing:
        wanted = ", ".join(map(str, found.missing))
        text += f": may not {wanted}"
        advice = f"ask for these rights in {found.namespace}, or set KUBECONFIG to what has them (docs/kubernetes.md)"
        return Finding("cluster", Level.HINT, text, advice, facts)
    return Finding("cluster", Level.OK, f"{text}: may {', '.join(map(str, found.allowed))}", facts=facts)


def _port(host: str, port: int, name: str, flag: str) -> Finding:
    facts: dict[str, object] = {"host": host, "port": port}
    if port == 0:
        return Finding(name, Level.OK, "a free one", facts=facts)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        advice = f"{flag} 0 takes a free one; or end what listens there"
        return Finding(name, Level.PROBLEM, f"{host}:{port}: {error.strerror}", advice, facts)
    return Finding(name, Level.OK, f"{host}:{port} is free", facts=facts)
