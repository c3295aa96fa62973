"""Part 3: what announcing, acknowledging and releasing a block costs: the control plane alone.

A tiny model makes blocks of 1 KiB and computes next to nothing. Without overlap all blocks of a prompt are announced
after the first token, so the handoff less the transfer is the control plane's: the line through several numbers of
blocks has what each block costs as its slope and what each request costs as its beginning. Releasing is measured
likewise, by playing a decode worker: release and half-close, until the prefill worker says that it holds no lease.

`stages` takes the same path apart, in this process: what a block costs in each encoding on its way.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import SimpleQueue

import grpc

from bench.kv.client import Prompts, StackClient
from bench.kv.results import Results
from bench.kv.settings import BenchSettings, Progress
from bench.kv.stacks import stack
from bench.kv.tiny_model import make_tiny_model
from common.errors import StartupError, TransferError
from common.sampling import SamplingParams
from engine import messages as m
from engine.blocks.block_manager import BlockManager
from engine.loading.embedded_model import ensure_model
from engine.request import Request
from kv_store.base import BlockRef
from protos.baton.v1 import prefill_pb2, prefill_pb2_grpc, types_pb2, worker_pb2, worker_pb2_grpc
from worker import convert

PART = "control"
BLOCK_SIZE = 16
NUM_BLOCKS = (4, 64, 256, 500)  # of a prompt
QUICK_NUM_BLOCKS = (4, 256)
REPEATS_FACTOR = 4  # these requests are short
_GIVE_UP_S = 60.0
_STAGE_BLOCKS = 32  # of one announcement: those of a chunk of 512 tokens


def run(settings: BenchSettings, results: Results, progress: Progress) -> None:
    stages(results, repeats=20 if settings.quick else 200)
    connector = settings.connectors[0]
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as folder:
        tokenizer_of = ensure_model(settings.model, settings.cache_dir, progress)
        model = make_tiny_model(Path(folder), tokenizer_of)
        arguments = (f"--connector={connector}", "--announce=end", f"--block-size={BLOCK_SIZE}")
        try:
            with stack(settings, *arguments, model=str(model)) as client:
                measure(client, results, settings, progress, connector)
        except StartupError as error:
            results.skipped[f"{PART}: {connector}"] = error.message


def measure(client: StackClient, results: Results, settings: BenchSettings, progress: Progress, connector: str) -> None:
    prompts = Prompts(settings.seed, PART)
    handoffs: dict[int, list[float]] = {}
    releases: dict[int, list[float]] = {}
    for num_blocks in QUICK_NUM_BLOCKS if settings.quick else NUM_BLOCKS:
        progress(f"{PART}: {num_blocks} blocks")
        handoffs[num_blocks], releases[num_blocks] = [], []
        for _ in range(settings.repeats * REPEATS_FACTOR):
            report = client.generate(prompts.new(num_blocks * BLOCK_SIZE), 4).report
            handoffs[num_blocks].append(report.timings.handoff_ms - report.timings.transfer_ms)
            releases[num_blocks].append(release_ms(report.prefill_worker, prompts.new(num_blocks * BLOCK_SIZE)))
        results.add(
            PART,
            {"handoff less transfer ms": handoffs[num_blocks], "release ms": releases[num_blocks]},
            connector=connector,
            num_blocks=num_blocks,
        )
    for name, samples in (("announce and acknowledge", handoffs), ("release", releases)):
        per_block, per_request = line({count: statistics.median(values) for count, values in samples.items()})
        results.add(PART, {"µs per block": [per_block * 1000]}, connector=connector, path=name)
        results.add(PART, {"µs per request": [per_request * 1000]}, connector=connector, path=name)


def line(points: dict[int, float]) -> tuple[float, float]:
    """Slope and intercept of the least-squares line."""
    slope, intercept = statistics.linear_regression(list(points.keys()), list(points.values()))
    return slope, intercept


def release_ms(address: str, prompt: list[int]) -> float:
    """Has a prefill worker compute a prompt, takes nothing, and releases it: time until the lease is over there.

    Raises `TransferError` if it is not.
    """
    with grpc.insecure_channel(address) as channel:
        status = worker_pb2_grpc.WorkerServiceStub(channel).GetStatus
        outbox: SimpleQueue[prefill_pb2.PrefillRequest | None] = SimpleQueue()
        start = prefill_pb2.PrefillStart(
            request_id=f"bench-{time.monotonic_ns()}",
            prompt_token_ids=prompt,
            sampling_params=types_pb2.SamplingParams(temperature=0, max_tokens=1),
        )
        outbox.put(prefill_pb2.PrefillRequest(start=start))
        events = prefill_pb2_grpc.PrefillServiceStub(channel).Prefill(iter(outbox.get, None), timeout=_GIVE_UP_S)
        _wait_for_all(events, -(-len(prompt) // BLOCK_SIZE))
        before = time.perf_counter()
        outbox.put(prefill_pb2.PrefillRequest(release=prefill_pb2.ReleaseBlocks()))
        outbox.put(None)
        for _ in events:  # until the worker ends the stream
            continue
        is_over = status(worker_pb2.GetWorkerStatusRequest()).load.num_leases == 0
        elapsed_ms = (time.perf_counter() - before) * 1000
        if not is_over:
            raise TransferError("a prefill worker held a lease after its stream had ended")
        return elapsed_ms


def _wait_for_all(events: Iterator[prefill_pb2.PrefillEvent], num_blocks: int) -> None:
    has_token = False
    while num_blocks or not has_token:
        event = next(events)
        num_blocks -= len(event.blocks_ready.blocks) + len(event.first_token.blocks_ready.blocks)
        has_token |= event.HasField("first_token")


# ------------------------------------------------------------------------------------------------- stages


def stages(results: Results, repeats: int) -> None:
    """µs a block, of each step of the path that costs more for more blocks; without sockets and threads."""
    refs = [
        BlockRef(index=i, block_hash=bytes([i]) * 16, peer="prefill-1a2b3c4d", epoch="0123456789abcdef", block_id=i)
        for i in range(_STAGE_BLOCKS)
    ]
    indexes = [ref.index for ref in refs]
    ready = prefill_pb2.BlocksReady(blocks=[convert.block_ref_message(ref) for ref in refs])
    wire = ready.SerializeToString()
    published = m.encode([m.BlocksPublished("request", refs, [], "", 0.0)])
    announced = m.encode([m.RemoteBlocksPublished("request", refs)])
    fetched = m.encode([m.BlocksFetched("request", indexes, [], "", 0, 0.0)])
    blocks = BlockManager(_STAGE_BLOCKS, BLOCK_SIZE, bytes(16))
    num_tokens = _STAGE_BLOCKS * BLOCK_SIZE
    request = Request(
        request_id="request",
        token_ids=list(range(num_tokens)),
        num_prompt_tokens=num_tokens,
        sampling_params=SamplingParams(),
        arrival_time=0.0,
    )

    def own() -> None:
        blocks.allocate(request, num_tokens)
        blocks.hold(request.block_ids)
        for block_id in request.block_ids:
            blocks.unhold(block_id)
        blocks.free(request)

    steps: dict[str, Callable[[], object]] = {
        "prefill engine → front": lambda: m.encode([m.BlocksPublished("request", refs, [], "", 0.0)]),
        "prefill front takes in": lambda: m.decode_events(published),
        "prefill front → wire": lambda: prefill_pb2.BlocksReady(
            blocks=[convert.block_ref_message(ref) for ref in refs]
        ).SerializeToString(),
        "wire → decode front": lambda: [
            convert.block_ref(block) for block in prefill_pb2.BlocksReady.FromString(wire).blocks
        ],
        "decode front → engine": lambda: m.encode([m.RemoteBlocksPublished("request", refs)]),
        "decode engine takes in": lambda: m.decode_commands(announced),
        "allocated, held, let go, freed": own,
        "arrival told to the front": lambda: m.decode_events(fetched),
        "acknowledgement": lambda: prefill_pb2.PrefillRequest(
            received=prefill_pb2.BlocksReceived(indexes=indexes)
        ).SerializeToString(),
    }
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(repeats):
        for name, step in steps.items():
            samples[name].append(_microseconds(step) / _STAGE_BLOCKS)
    for name, values in samples.items():
        results.add(PART, {"µs per block": values}, stage=name)
    total: Sequence[float] = [sum(one) for one in zip(*samples.values(), strict=True)]
    results.add(PART, {"µs per block": total}, stage="all of these")


def _microseconds(step: Callable[[], object], times: int = 10) -> float:
    start = time.perf_counter()
    for _ in range(times):
        step()
    return (time.perf_counter() - start) / times * 1e6
