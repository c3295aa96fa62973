"""What a CUDA device gives: is each of its paths right, and how near do they come to what the device allows?

    python -m bench.gpu [--models llama-8b,qwen3-30b] [--batches 1,8,32,128] [--context 1024] [--prompts 2048,8192]
                        [--layers N] [--parts paths,decode,shared,prefill,handoff] [--seconds 480] [--json FILE]

It needs torch with CUDA, safetensors, and what Baton's engine imports; FlashInfer if its paths are to be measured.
Weights are random, and made on the device: no checkpoint is read. First come the device's own limits (a copy of
memory, a matrix product), then small models on every path against float32, then decode and prefill of the two shapes,
each beside its limit: bytes that a step has to read over the rate of the copy, or products that it has to compute over
the rate of the matrix product. Decode is measured by steps, and by the engine with and without `--run-ahead`: what an
engine's step takes longer than its kernels run is how long the device stands still. Then come steps of which all rows
begin with the same blocks, with `--cascade-attention` and without. Last comes what reading the KV of a whole prompt
takes from another process on the device (NIXL; CUDA IPC), beside the prompt's prefill.

Each figure is printed as it comes, and none begins after `--seconds`. Exits with 1 if a path is wrong.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import statistics
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from safetensors.torch import save_file

from bench.gpu_handoff import handoff_ms
from common.config import EngineSettings
from common.errors import BatonError
from common.sampling import SamplingParams
from common.types import SampledToken
from engine import messages as m
from engine.attention.flashinfer import FlashInferBackend
from engine.core import EngineCore
from engine.device_thread import DeviceThread
from engine.local.device import LocalDevice
from engine.models.decoder import Decoder
from engine.sampling.draws import draw
from engine.step import StepOutput, StepRow
from kv_store.base import ConnectorConfig
from kv_store.memory import MemoryConnector

DEVICE = "cuda"
PARTS = ("paths", "decode", "shared", "prefill", "handoff")
BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0)
STEPS = 24  # of a decode figure, which is their median
CHUNK = 8192  # tokens of a prompt in a step, at most
ERROR = 0.03  # of bfloat16 logits against float32, relative, root of squares
TIMES = 1.5  # as large as with torch's own attention it may be in any case

Config = dict[str, object]
Row = dict[str, object]  # of a result: what was measured, and figures by name

LLAMA_8B: Config = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
QWEN3_30B: Config = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
}
MODELS = {"llama-8b": LLAMA_8B, "qwen3-30b": QWEN3_30B}
SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 2048,
}
BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - BEGAN:6.1f} s  {text}", flush=True)


# ------------------------------------------------------------------------------------------------ limits


@dataclass(slots=True, frozen=True)
class Limits:
    copy_gb_s: float  # bytes read and written
    gemm_tflop_s: float  # bfloat16


def median_ms(function: Callable[[], object], repeats: int) -> float:
    """Of a call on the device, by its own clock."""
    function()
    times: list[float] = []
    for _ in range(repeats):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        first.record()
        function()
        last.record()
        torch.cuda.synchronize()
        times.append(first.elapsed_time(last))
    return statistics.median(times)


def measure_limits() -> Limits:
    source = torch.randint(0, 255, (1 << 32,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    copy_ms = median_ms(partial(target.copy_, source), 7)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device=DEVICE) for _ in range(2))
    gemm_ms = median_ms(partial(torch.mm, a, b), 15)
    return Limits(2 * (1 << 32) / copy_ms / 1e6, 2 * 8192**3 / gemm_ms / 1e9)


# ------------------------------------------------------------------------------------------------ models


class Device(LocalDevice):
    """Says that it computed without doing so, as long as contexts are filled."""

    is_filling = False

    def _compute(self, rows: Sequence[StepRow], between_layers: Callable[[], None]) -> StepOutput:
        if self.is_filling:
            return StepOutput(tokens=[SampledToken(100) if row.draw else None for row in rows])
        return super()._compute(rows, between_layers)

    @contextmanager
    def without_graphs(self) -> Iterator[None]:
        graphs, self._graphs = self._graphs, None
        try:
            yield
        finally:
            self._graphs = graphs

    @contextmanager
    def without_fused_kernels(self) -> Iterator[None]:
        assert isinstance(self._model, Decoder)
        fused, self._model.fused = self._model.fused, None
        try:
            yield
        finally:
            self._model.fused = fused

    @contextmanager
    def reading_shared_blocks(self, *, once: bool) -> Iterator[None]:
        """Once for all rows, however little that saves, or row by row."""
        attention = self._attention
        assert isinstance(attention, FlashInferBackend)
        cascades, least = attention.cascades, attention.min_saved_tokens
        attention.cascades, attention.min_saved_tokens = once, 1
        try:
            yield
        finally:
            attention.cascades, attention.min_saved_tokens = cascades, least

    @property
    def cascades(self) -> bool:
        return self._attention.cascades

    @property
    def has_graphs(self) -> bool:
        return self._graphs is not None


def make_device(config: Config, folder: Path, attention: str | None = None, **settings: object) -> Device:
    """A model of random weights, those of norms 1."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    save_file({"model.norm.weight": torch.ones(8)}, folder / "model.safetensors")  # read by nobody

    def fill(model: Decoder, *_: object) -> None:
        generator = torch.Generator(device=DEVICE).manual_seed(1)
        for place in model.places().values():
            tensor = place if isinstance(place, torch.Tensor) else place.plain()
            if tensor.ndim == 1:
                tensor.fill_(1.0)
            else:
                # The same numbers in every dtype.
                numbers = torch.randn(tensor.shape, generator=generator, device=tensor.device)
                tensor.copy_((numbers * tensor.shape[-1] ** -0.5).bfloat16())

    given = {"device": DEVICE, "dtype": "bfloat16", "block_size": BLOCK_SIZE, "enable_prefix_caching": False}
    with mock.patch.object(Decoder, "load", fill):
        device = Device(folder, EngineSettings.model_validate(given | settings), attention=attention, raises=True)
    device.kv_cache.normal_()
    device.warm_up()
    return device


# ------------------------------------------------------------------------------------------------ correctness


def logits_of(device: Device, rows: Sequence[StepRow]) -> torch.Tensor:
    """`[num_rows, vocab_size]` float32, as the step gives them to what draws."""
    given: list[torch.Tensor] = []

    def keep(raw: torch.Tensor, draws: Sequence[object], _: object = None) -> list[SampledToken]:
        given.append(raw.float().cpu())
        return [SampledToken(0)] * len(draws)

    drawing = draw(SamplingParams(temperature=0.0, logprobs=1), 0)
    with mock.patch("engine.local.device.sample", keep):
        device.compute([replace(row, draw=drawing) for row in rows])
    return given[0]


def checked_paths(folder: Path) -> dict[str, float]:
    """Relative error of each path's logits, of the median row, against float32 with attention as the formula says."""
    errors: dict[str, float] = {}
    for name, config in MODELS.items():
        small = config | {key: value for key, value in SMALL.items() if key in config}
        common = {"num_blocks": 160, "max_num_seqs": 8}
        exact = make_device(small, folder / f"{name}-small", "reference", dtype="float32", **common)
        paths: dict[str, Device] = {"torch": make_device(small, folder / f"{name}-small", "torch", **common)}
        if importlib.util.find_spec("flashinfer"):
            paths["flashinfer"] = make_device(small, folder / f"{name}-small", "flashinfer", **common)
        for path, device in paths.items():
            for kind, expected, ours in _small_steps(exact, device):
                # The median, since a rounding may choose another expert for a token.
                errors[f"{name} {path} {kind}"] = float(
                    ((ours - expected).norm(dim=-1) / expected.norm(dim=-1)).median()
                )
    return errors


def _small_steps(exact: Device, device: Device) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Chunks, a mixed step, and single tokens, with a graph and without."""
    lengths = (1, 17, 40, 63, 200)  # ascending, as a step sorts its rows
    tables = [list(range(30 * i, 30 * i + 16)) for i in range(len(lengths))]

    def rows(counts: Sequence[int], done: Sequence[int]) -> list[StepRow]:
        return [
            StepRow(token_ids=[(7 * t + i) % 2000 for t in range(n)], num_computed_tokens=past, block_ids=table)
            for i, (n, past, table) in enumerate(zip(counts, done, tables, strict=True))
        ]

    steps = {
        "prefill": rows(lengths, [0] * 5),
        "mixed": rows((1, 1, 1, 5, 30), lengths),
        "decode": rows([1] * 5, [2, 18, 41, 68, 230]),
    }
    for kind, step in steps.items():
        expected = logits_of(exact, step)
        yield kind, expected, logits_of(device, step)
        if kind == "decode" and device.has_graphs:
            with device.without_graphs():
                yield "decode without graphs", expected, logits_of(device, step)


# ------------------------------------------------------------------------------------------------ speed


@dataclass(slots=True, frozen=True)
class Size:
    """Parameters and bytes of a model in bfloat16."""

    dense: int  # parameters that every step reads, the head included
    expert: int  # parameters of one expert of one layer
    num_experts: int
    per_token: int
    layers: int
    hidden: int
    heads_dim: int
    kv_token: int  # bytes of a token's KV

    @classmethod
    def of(cls, config: Config) -> Size:
        def number(key: str) -> int:
            value = config.get(key, 0)
            assert isinstance(value, int)
            return value

        hidden, layers, dim = number("hidden_size"), number("num_hidden_layers"), number("head_dim")
        heads, kv_heads, experts = (
            number(key) for key in ("num_attention_heads", "num_key_value_heads", "num_experts")
        )
        attention = hidden * dim * (2 * heads + 2 * kv_heads)
        mlp = hidden * experts if experts else 3 * hidden * number("intermediate_size")
        return cls(
            dense=layers * (attention + mlp) + hidden * number("vocab_size"),
            expert=3 * hidden * number("moe_intermediate_size") if experts else 0,
            num_experts=experts,
            per_token=number("num_experts_per_tok"),
            layers=layers,
            hidden=hidden,
            heads_dim=heads * dim,
            kv_token=4 * layers * kv_heads * dim,
        )

    def decode_bytes(self, batch: int, context: int) -> float:
        """What a step must read. Of experts, as many as `batch` tokens choose at random."""
        used = self.num_experts * (1 - (1 - self.per_token / self.num_experts) ** batch) if self.num_experts else 0
        return 2 * (self.dense + self.layers * used * self.expert) + batch * context * self.kv_token

    def prefill_flop(self, tokens: int, head: int) -> float:
        products = self.dense - head + self.layers * self.per_token * self.expert
        return 2 * tokens * products + 2 * self.layers * self.heads_dim * tokens * tokens + 2 * head


def decode_rows(batch: int, context: int) -> list[StepRow]:
    per_row = -(-(context + STEPS + 8) // BLOCK_SIZE)
    drawing = draw(GREEDY, 0)
    return [
        StepRow(
            token_ids=[100 + row],
            num_computed_tokens=context,
            block_ids=array("i", range(row * per_row, (row + 1) * per_row)),  # as a request keeps them
            draw=drawing,
        )
        for row in range(batch)
    ]


def step_ms(device: Device, rows: Sequence[StepRow], steps: int = STEPS) -> float:
    """Milliseconds of a step by the host's clock, from rows to tokens."""
    times: list[float] = []
    for number in range(steps + 3):
        past = number % STEPS if len(rows[0].token_ids) == 1 else 0
        moved = [replace(row, num_computed_tokens=row.num_computed_tokens + past) for row in rows]
        start = time.perf_counter()
        device.compute(moved)
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[3:])


def busy(device: Device, rows: Sequence[StepRow], top: int = 8) -> tuple[float, int, list[str]]:
    """Milliseconds in which kernels ran in one step, how many, and the longest by name with their share."""
    device.compute(rows)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        device.compute(rows)
        torch.cuda.synchronize()
    events = [one for one in profile.key_averages() if one.self_device_time_total > 0]
    total = sum(one.self_device_time_total for one in events)
    events.sort(key=lambda one: -one.self_device_time_total)
    names = [f"{one.self_device_time_total / total:.1%} {one.count} x {one.key[:70]}" for one in events[:top]]
    return total / 1e3, sum(one.count for one in events), names


def engine_step_ms(device: Device, batch: int, context: int, *, run_ahead: bool = False) -> float:
    """Milliseconds of a step of the whole engine, scheduler and events included, by the host's clock."""
    settings = EngineSettings.model_validate(
        {
            "max_num_batched_tokens": batch * (context + 1),
            "chunk_size": context + 1,
            "max_num_seqs": batch,
            "enable_prefix_caching": False,
            "run_ahead": run_ahead,
        }
    )
    connector = MemoryConnector(ConnectorConfig(epoch="bench", worker_id="bench"))
    thread = DeviceThread(device) if run_ahead else None
    core = EngineCore(settings, thread or device, connector, time.monotonic, lambda: None)
    params = replace(GREEDY, max_tokens=STEPS + 4, ignore_eos=True)
    for number in range(batch):
        prompt = [(number + place) % 1000 + 3 for place in range(context)]
        core.handle(m.AddRequest(request_id=str(number), prompt_token_ids=prompt, sampling_params=params))
    device.is_filling = True
    while len(core.scheduler.decodes) < batch:
        core.step()
    device.is_filling = False
    times: list[float] = []
    for _ in range(STEPS):
        start = time.perf_counter()
        core.step()
        times.append(1e3 * (time.perf_counter() - start))
        core.take_events()
    while core.has_work:
        core.step()
        core.take_events()
    core.close()
    if thread is not None:
        thread.close()
    return statistics.median(times)


def decode_row(device: Device, name: str, batch: int, context: int, limit_ms: float, *, in_torch: bool) -> Row:
    """`in_torch`: also without kernels of our own, if graphs are recorded."""
    rows = decode_rows(batch, context)
    whole = step_ms(device, rows)
    kernels, count, names = busy(device, rows)
    row: Row = {
        "what": f"{name} decode, batch {batch}, context {context}",
        "ms": whole,
        "limit_ms": limit_ms,
        "of_limit": limit_ms / whole,
        "kernels_ms": kernels,
        "num_kernels": count,
        "tokens_per_s": batch / whole * 1e3,
        "longest": names,
    }
    for suffix, run_ahead in (("", False), ("_ahead", True)):
        engine = engine_step_ms(device, batch, context, run_ahead=run_ahead)
        row[f"engine_ms{suffix}"] = engine
        row[f"idle_ms{suffix}"] = engine - kernels
    if device.has_graphs:
        with device.without_graphs():
            eager = step_ms(device, rows)
            row["ms_without_graphs"] = eager
            row["ms_saved_by_graphs"] = eager - whole
            if in_torch:
                with device.without_fused_kernels():
                    row["ms_in_plain_torch"] = step_ms(device, rows)
                    row["kernels_ms_in_plain_torch"], row["num_kernels_in_plain_torch"], _ = busy(device, rows)
    return row


def shared_row(device: Device, name: str, batch: int, num_shared: int) -> Row:
    """A step of rows that share `num_shared` tokens, whole blocks, and have one block of their own before the step."""
    per_row = -(-(BLOCK_SIZE + STEPS + 8) // BLOCK_SIZE)
    shared = list(range(num_shared // BLOCK_SIZE))
    rows = [
        StepRow(
            token_ids=[100 + row],
            num_computed_tokens=num_shared + BLOCK_SIZE,
            block_ids=array("i", [*shared, *range(len(shared) + row * per_row, len(shared) + (row + 1) * per_row)]),
            draw=draw(GREEDY, 0),
        )
        for row in range(batch)
    ]
    is_taken = device._attention.shared_prefixes(rows) is not None
    figures: dict[str, float] = {}
    for suffix, once in (("", True), ("_row_by_row", False)):
        with device.reading_shared_blocks(once=once):
            figures[f"ms{suffix}"] = step_ms(device, rows)
            figures[f"kernels_ms{suffix}"], _, _ = busy(device, rows)
    return {
        "what": f"{name} decode, batch {batch}, {num_shared} tokens shared",
        **figures,
        "ms_saved": figures["ms_row_by_row"] - figures["ms"],
        "is_taken": is_taken,  # by the rule that decides if nobody forces it
    }


def prefill_row(device: Device, name: str, length: int, limit_ms: float) -> Row:
    prompt = StepRow(
        token_ids=[(3 * place) % 1000 + 3 for place in range(length)],
        num_computed_tokens=0,
        block_ids=array("i", range(-(-length // BLOCK_SIZE))),
        draw=draw(GREEDY, 0),
    )
    whole = step_ms(device, [prompt], 5) if length <= CHUNK else float("nan")
    kernels, count, names = busy(device, [prompt])
    return {
        "what": f"{name} prefill, {length} tokens in one step",
        "ms": whole,
        "limit_ms": limit_ms,
        "of_limit": limit_ms / whole,
        "kernels_ms": kernels,
        "num_kernels": count,
        "tokens_per_s": length / whole * 1e3,
        "longest": names,
    }


def handoff_row(device: Device, name: str, length: int, prefill_ms: float) -> Row:
    """Of the blocks of a prompt, and of those of its last chunk, which are all that is left when it is computed."""
    row: Row = {"what": f"{name} handoff, {length} tokens"}
    last = EngineSettings().chunk_size // BLOCK_SIZE
    try:
        whole, rest = handoff_ms(device.info.spec, -(-length // BLOCK_SIZE), last, DEVICE)
    except BatonError as error:  # NIXL is not here
        return row | {"why_not": error.message}
    return row | {"ms": whole, "last_chunk_ms": rest, "last_chunk_of_prefill": rest / prefill_ms}


def measure_model(name: str, args: argparse.Namespace, limits: Limits, folder: Path) -> Iterator[Row]:
    config = dict(MODELS[name])
    if args.layers:
        config["num_hidden_layers"] = args.layers
    size = Size.of(config)
    vocab = config["vocab_size"]
    assert isinstance(vocab, int)
    tokens = max(max(args.batches) * (args.context + STEPS + 24), max(args.prompts) + 64)
    say(f"{name}: weights are made and kernels prepared")
    device = make_device(
        config,
        folder / name,
        num_blocks=tokens // BLOCK_SIZE + 1,
        max_num_seqs=max(args.batches),
        max_model_len=max(args.prompts) + 64,
        cascade_attention="auto",
    )
    attention = type(device._attention).__name__
    say(f"{name}: {size.dense / 1e9:.2f} G parameters in every step, {attention}, graphs: {device.has_graphs}")
    for batch in args.batches if "decode" in args.parts else ():
        limit = size.decode_bytes(batch, args.context) / limits.copy_gb_s / 1e6
        yield decode_row(device, name, batch, args.context, limit, in_torch=batch == args.batches[0])
    for batch in args.batches if "shared" in args.parts and device.cascades else ():
        for num_shared in sorted({max(args.prompts) // part // BLOCK_SIZE * BLOCK_SIZE for part in (16, 4, 2)} - {0}):
            if batch > 1:
                yield shared_row(device, name, batch, num_shared)
    for length in args.prompts if "prefill" in args.parts else ():
        flop = size.prefill_flop(length, size.hidden * vocab)
        row = prefill_row(device, name, length, flop / limits.gemm_tflop_s / 1e9)
        yield row
        if "handoff" in args.parts and length <= CHUNK:
            assert isinstance(row["ms"], float)
            yield handoff_row(device, name, length, row["ms"])
    del device
    torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=_names, default=list(MODELS))
    parser.add_argument("--batches", type=_numbers, default=[1, 8, 32, 128])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--prompts", type=_numbers, default=[2048, 8192])
    parser.add_argument("--layers", type=int, default=0, help="of a model, fewer than it has")
    parser.add_argument("--parts", type=_parts, default=list(PARTS), help="handoff goes with prefill")
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA device")
    facts = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "flashinfer": _version("flashinfer-python"),
    }
    say(str(facts))
    limits = measure_limits()
    say(f"copy {limits.copy_gb_s:.0f} GB/s (read and written), bfloat16 product {limits.gemm_tflop_s:.0f} TFLOP/s")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        errors = checked_paths(Path(folder)) if "paths" in args.parts else {}
        wrong = [path for path, error in errors.items() if not error < max(ERROR, TIMES * _of_torch(errors, path))]
        for path, error in errors.items():
            say(f"{path}: relative error {error:.4f}{'  WRONG' if path in wrong else ''}")
        _write(args.json, {"facts": facts, "limits": vars_of(limits), "errors": errors, "rows": rows})
        for row in (row for name in args.models for row in measure_model(name, args, limits, Path(folder))):
            rows.append(row)
            _write(args.json, {"facts": facts, "limits": vars_of(limits), "errors": errors, "rows": rows})
            say(f"{row['what']}: {told(row)}")
            if time.monotonic() - BEGAN > args.seconds:
                say("no time is left for the rest")
                break
    return int(bool(wrong))


def _of_torch(errors: dict[str, float], path: str) -> float:
    """The error of the same steps with torch's attention."""
    model, _, kind = path.split(" ", 2)
    return errors.get(f"{model} torch {kind.removesuffix(' without graphs')}", 0.0)


def told(row: Row) -> str:
    figures = {key: round(one, 3) if isinstance(one, float) else one for key, one in row.items()}
    return ", ".join(f"{key} {one}" for key, one in figures.items() if key not in ("what", "longest"))


def vars_of(limits: Limits) -> dict[str, float]:
    return {"copy_gb_s": limits.copy_gb_s, "gemm_tflop_s": limits.gemm_tflop_s}


def _write(file: Path | None, result: object) -> None:
    if file is not None:
        file.write_text(json.dumps(result, indent=1))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _names(text: str) -> list[str]:
    return _known(text, MODELS)


def _parts(text: str) -> list[str]:
    return _known(text, PARTS)


def _known(text: str, known: Collection[str]) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: known are {', '.join(known)}")
    return names


def _numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
