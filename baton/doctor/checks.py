"""What `baton up` would find on this machine, and what to do about what is missing.

Each check yields one finding as soon as it is known. A check never raises for what it looks at: that is its finding.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import shutil
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import torch

from baton.doctor import cluster_check, tuning
from baton.doctor.speed import ROWS, SIZE, CpuSpeed, measure_cpu
from baton.doctor.tuning import Seconds, StepMeasurer
from baton.stack import lmcache_server
from baton.stack.kv_directory import private_parent
from baton.stack.stack_plan import usable_cores
from common.config import DEFAULT_MODEL, EngineSettings, UpSettings
from common.cpu import read_cpu, read_limits
from common.errors import BatonError
from common.model_files import checkpoint_dtype, model_identity, open_model
from engine.kernels.choice import AUTO, TORCH, Choice, built_variants, choose, cpu_instruction_sets
from engine.kernels.library import DTYPES, choose_kernels
from engine.kernels.table import SHIPPED, BrokenTableError, Rule, Table, Tuned, TunedFor, keep_tuned, tuned_file
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
FASTER = 1.1  # times as fast, to be worth advice

Progress = Callable[[str, float], None]
"""Hears what is measured, and which share of all is done."""


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


def examine(
    settings: UpSettings, *, tune: bool = False, progress: Progress = lambda _what, _share: None
) -> Iterator[Finding]:
    """All findings, in the order in which they are read. `settings` are those of `baton up`. `tune` measures steps of
    the model and writes what engines then compute them with."""
    cores = settings.cpu_cores or usable_cores()
    num_threads = len(cores) or os.cpu_count() or 1
    torch.set_num_threads(num_threads)
    yield _cpu(num_threads)
    device, device_finding = _device(settings)
    model, model_finding = _model(settings)
    dtype, dtype_finding = _dtype(settings, model, device, _possible_kernels(settings))
    kernels, table, finding = _kernels(settings, device, model, dtype, will_tune=tune)
    yield from (finding, device_finding, model_finding, dtype_finding)
    yield from _quantization(settings, device, dtype, kernels)
    yield from _speed(settings, kernels, dtype, model, num_threads, None if tune else table)
    if tune:
        yield _tune(settings, kernels, model, dtype, num_threads, progress)
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
        "kind": cpu.kind,
        "num_cores": num_threads,
        "instruction_sets": sets,
        "limits": limits,
        "available_memory_bytes": available,
    }
    text = f"{cpu.title}, {num_threads} cores ({', '.join(sets) or 'no instruction set known'}){memory}"
    if limits:
        return Finding("cpu", Level.HINT, text, f"{' and '.join(limits)} keeps a part of it unused: unset it", facts)
    return Finding("cpu", Level.OK, text, facts=facts)


def _possible_kernels(settings: UpSettings) -> Choice:
    """What was asked for, or what can run here in its place."""
    try:
        return choose(settings.kernels)
    except BatonError:
        return choose(AUTO)


def _kernels(
    settings: UpSettings, device: DeviceChoice, model: Path | None, dtype: DtypeChoice, *, will_tune: bool
) -> tuple[Choice, Table, Finding]:
    """What engines compute with, and the table that they read."""
    name = "kernels"
    try:
        choice = choose(settings.kernels)
    except BatonError as error:
        fallback = choose(AUTO)
        advice = f"--kernels {fallback.instruction_set}"
        return fallback, SHIPPED, Finding(name, Level.PROBLEM, error.message, advice)
    facts: dict[str, object] = {"kernels": choice.instruction_set, "reason": choice.reason, "built": built_variants()}
    table = SHIPPED
    try:
        used, used_table = choose_kernels(
            settings.kernels,
            device=torch.device(device.device),
            dtype=getattr(torch, dtype.dtype),
            cache_dir=None if will_tune else settings.cache_dir,  # tuning writes anew what is there
            model="" if model is None else model_identity(model),
        )
    except BatonError as error:
        if isinstance(error, BrokenTableError):
            advice = f"delete {tuned_file(settings.cache_dir)}, or run baton doctor --tune again"
            return choice, table, Finding(name, Level.PROBLEM, error.message.partition(";")[0], advice, facts)
        return choice, table, Finding(name, Level.PROBLEM, error.message, "--kernels auto; or --device cpu", facts)
    if TORCH not in (choice.instruction_set, used.instruction_set):  # or not for this device or dtype
        choice, table = used, used_table
        facts |= {"kernels": choice.instruction_set, "reason": choice.reason}
    text = f"{choice.instruction_set}: {choice.reason}"
    facts["rules"] = [dataclasses.asdict(rule) for rule in table.rules]
    if table.file:
        facts["tuned_in"] = table.file
        text += f"; tuned for this model: {_describe(table.rules)} ({table.file})"
    elif table.rules:
        text += f"; {_describe(table.rules)}"
    if choice.instruction_set != TORCH or settings.kernels == TORCH:
        return choice, table, Finding(name, Level.OK, text, facts=facts)
    return choice, table, Finding(name, Level.HINT, text, _kernels_advice(), facts)


def _kernels_advice() -> str:
    """What lets kernels run if `auto` means torch."""
    has, built = cpu_instruction_sets(), built_variants()
    if not built:
        return "install g++ or clang++, then `python -m engine.kernels.build` (or make install)"
    if not has:
        return "use a CPU with AVX2 and FMA, or a 64-bit Arm: those run the kernels"
    if not any(name in built for name in has):
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
            cache_dir=None,
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
    others = [] if settings.quantization != "none" else [one for one in _variants_here() if one not in ("avx2", "neon")]
    speed = measure_cpu(kernels, dtype.dtype, num_threads, others)
    facts: dict[str, object] = {"read_gb_s": round(speed.read_gb_s, 2)}
    text = f"{speed.read_gb_s:.1f} GB/s read"
    if speed.kernels_read_gb_s is not None:
        facts["kernels_read_gb_s"] = round(speed.kernels_read_gb_s, 2)
        text += f", {speed.kernels_read_gb_s / speed.read_gb_s:.0%} of it by the kernels with one token"
    if model is not None:
        most = speed.read_gb_s * 1e9 / _decode_bytes(model, dtype, settings.quantization)
        facts["max_decode_tokens_s"] = round(most, 1)
        text += f": weights let one stream decode {most:.0f} tokens/s on the CPU at most"
    yield Finding("bandwidth", Level.OK, text, facts=facts)
    torch_from = None if table is None else table.torch_from(dtype.dtype, SIZE * SIZE)
    yield _products(settings, kernels, dtype.dtype, speed, torch_from, is_tuning=table is None)


def _products(
    settings: UpSettings, kernels: Choice, dtype: str, speed: CpuSpeed, torch_from: int | None, *, is_tuning: bool
) -> Finding:
    """What engines multiply with, and how far it is from the fastest way that this machine has."""
    own = speed.kernels_gflop_s
    rates = {TORCH: speed.torch_gflop_s, **speed.others_gflop_s}
    if own is not None:
        rates[kernels.instruction_set] = own
    used = TORCH if own is None or (torch_from is not None and torch_from <= ROWS) else kernels.instruction_set
    fastest = max(rates, key=lambda name: rates[name])
    facts: dict[str, object] = {
        "dtype": dtype,
        "used": used,
        "used_gflop_s": round(rates[used], 1),
        "torch_gflop_s": round(speed.torch_gflop_s, 1),
        "kernels_gflop_s": None if own is None else round(own, 1),
        "limit": fastest,
        "limit_gflop_s": round(rates[fastest], 1),
    }
    text = f"{rates[used]:.0f} GFLOP/s in {dtype} with {used}, which engines use"
    if used != fastest:
        text += f": {rates[used] / rates[fastest]:.0%} of the fastest way here"
    rest = sorted((name for name in rates if name != used), key=lambda name: rates[name], reverse=True)
    text += "".join(f"; {rates[name]:.0f} with {name}" for name in rest)
    if is_tuning or own is None or settings.quantization != "none" or rates[fastest] < FASTER * rates[used]:
        return Finding("products", Level.OK, text, facts=facts)
    advice = "baton doctor --tune finds out whether whole steps of this model are faster with it"
    return Finding("products", Level.HINT, text, advice, facts)


def _variants_here() -> list[str]:
    """That can run, weakest first."""
    choice = choose(AUTO)
    return [] if choice.instruction_set == TORCH else [*choice.slower, choice.instruction_set]


def _tune(
    settings: UpSettings,
    kernels: Choice,
    model: Path | None,
    dtype: DtypeChoice,
    num_threads: int,
    progress: Progress,
) -> Finding:
    name = "tune"
    if kernels.instruction_set == TORCH or getattr(torch, dtype.dtype) not in DTYPES:
        return Finding(name, Level.HINT, f"nothing to choose: torch computes everything ({kernels.reason})")
    if model is None:
        return Finding(name, Level.HINT, "there is no model yet whose steps could be measured", "baton up, once")
    cpu = read_cpu()
    of = TunedFor(cpu.kind or cpu.name, model_identity(model), dtype.dtype, settings.quantization)
    engine = EngineSettings(
        device="cpu",
        dtype=dtype.dtype,
        quantization=settings.quantization,
        num_threads=num_threads,
        block_size=settings.block_size,
        num_blocks=tuning.num_blocks(settings.block_size),
    )
    variants = [kernels.instruction_set] if settings.kernels != AUTO else tuning.possible_variants(_variants_here())
    try:
        found = tuning.tune(
            variants,
            has_rules=settings.quantization == "none",
            measure=StepMeasurer(model, engine, of),
            progress=progress,
        )
    except BatonError as error:
        return Finding(name, Level.PROBLEM, error.message, "nothing was written")
    shipped_s = found.seconds[None]
    facts: dict[str, object] = {
        "file": str(tuned_file(settings.cache_dir)),
        "model": str(model),
        "best": None if found.best is None else dataclasses.asdict(found.best),
        "milliseconds": {
            str(one or "as shipped"): {step: round(1e3 * each, 2) for step, each in seconds.items()}
            for one, seconds in found.seconds.items()
        },
    }
    tuned = None if found.best is None else Tuned(of, found.best.instruction_set, found.best.rules(dtype.dtype))
    try:
        file = keep_tuned(settings.cache_dir, of, tuned)
    except OSError as error:
        file = tuned_file(settings.cache_dir)
        return Finding(name, Level.PROBLEM, f"{file}: {error.strerror}", "--cache-dir DIR", facts)
    if found.best is None:
        text = f"nothing makes some step faster and none slower than what is shipped ({_milliseconds(shipped_s)})"
        return Finding(name, Level.OK, text, facts=facts)
    gains = ", ".join(f"{step} {shipped_s[step] / each:.2f} times" for step, each in found.seconds[found.best].items())
    text = f"{found.best}: as fast as shipped or faster in each step ({gains}); engines read {file}"
    return Finding(name, Level.OK, text, facts=facts)


def _milliseconds(seconds: Seconds) -> str:
    return ", ".join(f"{step} {1e3 * each:.1f} ms" for step, each in seconds.items())


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


def _cluster(timeout_s: float = cluster_check.TIMEOUT_S) -> Finding:
    """Nobody needs a cluster for `baton up`, so the worst is a hint."""
    found = cluster_check.look(timeout_s)
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
