"""Other houses' benchmarks (`make peers`), unchanged: they run against Baton, and find what `baton bench serve` finds.

Both endpoints answer by the clock, so that the figures do not depend on this machine: a server that does nothing else
(four users at a time), and Baton with a simulated device whose steps all take the same time (one user: which requests
share a step would depend on when exactly each comes).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from common.batch_time import FEATURES, BatchTime, BatchTimeKey, Regime, RegimeTime, Table
from common.batch_time_file import encode
from common.config import DEFAULT_MODEL, default_cache_dir
from engine.loading.embedded_model import ensure_model, package_is_installed
from tests.clients.timed_server import MODEL, timed_server
from tests.integration.stack import Stack, running

ROOT = Path(__file__).resolve().parents[2]
BIN = ROOT / ".venv-peers" / "bin"
SCRIPTS = Path(__file__).parent / "scripts"
TIMEOUT_S = 280
TTFT_S, GAP_S = 0.5, 0.05
PROMPT_TOKENS, OUTPUT_TOKENS = 40, 51  # long: what a benchmark does between two requests counts little beside them
SAME = 0.05
"""What two benchmarks may differ by: medians of latencies, and rates."""
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

Figures = dict[str, float]


@dataclass(frozen=True)
class Load:
    url: str
    model: str
    users: int
    requests: int
    tokenizer: Path
    folder: Path  # for what a benchmark writes


def ran(command: list[str | Path], folder: Path, offline: Mapping[str, str] = OFFLINE) -> str:
    """What it printed."""
    folder.mkdir()
    own = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "OPENAI_", "BATON_"))}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
        cwd=folder,
        env={**own, **offline, "HOME": str(folder), "PATH": f"{BIN}:{os.environ['PATH']}", "TERM": "dumb"},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return done.stdout


def baton(load: Load) -> Figures:
    options = [f"--base-url={load.url}", "--backend=openai-chat", f"--model={load.model}", f"--users={load.users}"]
    options += [f"--num-prompts={load.requests}", "--max-send-lag=1e9", f"--tokenizer={load.tokenizer}", "--json"]
    options += [f"--random-input-len={PROMPT_TOKENS}", f"--random-output-len={OUTPUT_TOKENS}"]
    found = json.loads(ran([sys.executable, "-m", "baton", "bench", "serve", *options], load.folder / "baton"))
    return {name: found[name] for name in NAMES}


def vllm(load: Load) -> Figures:
    folder = load.folder / "vllm"
    options = [f"--base-url={load.url}", "--backend=openai-chat", "--endpoint=/v1/chat/completions", "--ignore-eos"]
    options += [f"--model={load.model}", f"--tokenizer={load.tokenizer}", "--dataset-name=random", "--temperature=0"]
    options += [f"--random-input-len={PROMPT_TOKENS}", f"--random-output-len={OUTPUT_TOKENS}", "--disable-tqdm"]
    options += [f"--num-prompts={load.requests}", f"--max-concurrency={load.users}", "--ready-check-timeout-sec=0"]
    options += [
        "--percentile-metrics=ttft,tpot,itl,e2el",
        "--save-result",
        f"--result-dir={folder}",
        "--result-filename=vllm.json",
    ]
    ran([BIN / "python", "-W", "ignore", SCRIPTS / "vllm_bench_serve.py", *options], folder)
    found = json.loads((folder / "vllm.json").read_text())
    return {name: found[name] for name in NAMES}


def aiperf(load: Load) -> Figures:
    folder = load.folder / "aiperf"
    options = [f"--url={load.url}", "--endpoint-type=chat", "--streaming", f"--model={load.model}", "--ui=none"]
    options += [f"--tokenizer={load.tokenizer}", f"--isl={PROMPT_TOKENS}", f"--osl={OUTPUT_TOKENS}", "--osl-stddev=0"]
    options += [f"--concurrency={load.users}", f"--request-count={load.requests}", "--use-server-token-count"]
    options += ["--extra-inputs=ignore_eos:true", "--extra-inputs=temperature:0", "--no-gpu-telemetry"]
    options += ["--workers-max=1", "--record-processors=1", f"--artifact-dir={folder}"]
    # Told to stay offline, it takes a path of a tokenizer for a name of the hub.
    ran([BIN / "aiperf", "profile", *options], folder, offline={})
    found = json.loads(next(folder.rglob("profile_export_aiperf.json")).read_text())
    return {
        "completed": found["request_count"]["avg"],
        "total_output_tokens": found["output_sequence_length"]["avg"] * found["request_count"]["avg"],
        "request_throughput": found["request_throughput"]["avg"],
        "output_throughput": found["output_token_throughput"]["avg"],
        "median_ttft_ms": found["time_to_first_token"]["p50"],
        "median_tpot_ms": found["inter_token_latency"]["p50"],
        "median_e2el_ms": found["request_latency"]["p50"],
    }


def guidellm(load: Load) -> Figures:
    folder = load.folder / "guidellm"
    options = [f"--backend=kind=openai_http,target={load.url},model={load.model}", "--disable-console-interactive"]
    options += [
        f"--profile=kind=concurrent,streams={load.users}",
        f"--tokenizer=kind=huggingface_auto,model={load.tokenizer}",
    ]
    options += [
        f"--constraint=kind=max_requests,count={load.requests}",
        f"--output=kind=json,path={folder / 'found.json'}",
    ]
    options += [f"--data=kind=synthetic_text,prompt_tokens={PROMPT_TOKENS},output_tokens={OUTPUT_TOKENS}"]
    ran([BIN / "guidellm", "run", *options], folder)
    (found,) = json.loads((folder / "found.json").read_text())["benchmarks"]
    metrics = found["metrics"]

    def middle(name: str) -> float:
        value: float = metrics[name]["successful"]["median"]
        return value

    completed = metrics["request_totals"]["successful"]
    return {
        "completed": completed,
        "total_output_tokens": metrics["output_token_count"]["successful"]["mean"] * completed,
        "request_throughput": metrics["requests_per_second"]["successful"]["mean"],
        "output_throughput": metrics["output_tokens_per_second"]["successful"]["mean"],
        "median_ttft_ms": middle("time_to_first_token_ms"),
        "median_tpot_ms": middle("inter_token_latency_ms"),  # its time per output token has the first one in it
        "median_e2el_ms": 1000 * middle("request_latency"),
    }


PEERS: Mapping[str, Callable[[Load], Figures]] = {"vllm": vllm, "aiperf": aiperf, "guidellm": guidellm}
COUNTS = ("completed", "total_output_tokens")
NAMES = (*COUNTS, "request_throughput", "output_throughput", "median_ttft_ms", "median_tpot_ms", "median_e2el_ms")


@pytest.fixture(scope="session")
def tokenizer() -> Path:
    if not BIN.exists():
        pytest.skip("there is no .venv-peers: `make peers` installs it")
    if not package_is_installed():
        pytest.skip("the embedded model's package is not installed")
    return ensure_model(DEFAULT_MODEL, default_cache_dir(), print)


@pytest.fixture(scope="session")
def even_times(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of time: a prompt takes `TTFT_S`, a token `GAP_S`, whatever else is in their step."""

    def always(seconds: float) -> RegimeTime:
        return RegimeTime(layers=Table(seconds=(seconds,)), head=Table(), coefficients=(0.0,) * len(FEATURES))

    key = BatchTimeKey(
        spec="any", quantization="none", device="simulated", processor="a clock", kernels="none", num_threads=1
    )
    regimes = {Regime.PREFILL: always(TTFT_S), Regime.DECODE: always(GAP_S), Regime.MIXED: always(TTFT_S)}
    path = tmp_path_factory.mktemp("times") / "even.json"
    path.write_bytes(encode(BatchTime(key=key, regimes=regimes)))
    return path


@pytest.fixture(scope="session")
def timed(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Load, Figures]]:
    folder = tmp_path_factory.mktemp("timed")
    with timed_server(TTFT_S, GAP_S) as url:
        load = Load(url=url, model=MODEL, users=4, requests=16, tokenizer=tokenizer, folder=folder)
        yield load, baton(load)


@pytest.fixture(scope="session")
def simulated(
    tokenizer: Path, even_times: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Load, Figures]]:
    folder = tmp_path_factory.mktemp("simulated")
    stack = Stack(folder, "--device=simulated", f"--simulated-time={even_times}", f"--model={tokenizer}")
    with running(stack):
        load = Load(url=stack.http, model=tokenizer.name, users=1, requests=5, tokenizer=tokenizer, folder=folder)
        yield load, baton(load)


def test_what_is_known_before_is_found(timed: tuple[Load, Figures]) -> None:
    load, found = timed
    assert found["completed"] == load.requests
    assert found["total_output_tokens"] == load.requests * OUTPUT_TOKENS
    request_s = TTFT_S + (OUTPUT_TOKENS - 1) * GAP_S
    wanted = {"median_ttft_ms": 1000 * TTFT_S, "median_tpot_ms": 1000 * GAP_S, "median_e2el_ms": 1000 * request_s}
    wanted["request_throughput"] = load.users / request_s
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=SAME), name


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("endpoint", ["timed", "simulated"])
def test_a_peer_finds_the_same(request: pytest.FixtureRequest, endpoint: str, peer: str) -> None:
    load, wanted = request.getfixturevalue(endpoint)
    found = PEERS[peer](load)
    print(json.dumps({"baton": wanted, peer: found}))
    for name in NAMES:
        allowed = 0.0 if name in COUNTS else SAME
        assert found[name] == pytest.approx(wanted[name], rel=allowed), (name, found, wanted)
