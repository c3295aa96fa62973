"""One request is one trace over three processes, each of which sends its own spans to a collector."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import signal
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import grpc
import httpx
import pytest

from baton.cli.main import main
from common.sampling import SamplingOptions
from common.types import WorkerRole
from protos.baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.chaos.tiny_model import random_prompt, write_tiny_model
from tests.integration.stack import Fleet, running, wait_for
from worker.profiles import find_py_spy

pytest.importorskip("opentelemetry.exporter.otlp.proto.grpc", reason="needs opentelemetry's exporters")

from tests.support.collector import Collector, SeenSpan, collecting

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CALLER = "b7ad6b7169203331"
SERVICES = {"baton-router", "baton-decode", "baton-prefill"}
CHUNK, NUM_PROMPT_TOKENS = 64, 200
SLACK_NS = 50_000_000  # clocks are set while processes run


class TracedFleet(Fleet):
    """Its prefill worker sends spans over HTTP, the others over gRPC."""

    collector: Collector

    def environ_of(self, name: str) -> Mapping[str, str]:
        over_http = name.startswith("prefill")
        return {
            "OTEL_EXPORTER_OTLP_ENDPOINT": self.collector.http_url if over_http else self.collector.grpc_url,
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf" if over_http else "grpc",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=test",
            "OTEL_BSP_SCHEDULE_DELAY": "50",
        }


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TracedFleet]:
    folder = tmp_path_factory.mktemp("fleet")
    write_tiny_model(folder / "model")
    flags = (f"--model={folder / 'model'}", f"--chunk-size={CHUNK}")
    with collecting() as collector:
        TracedFleet.collector = collector
        fleet = TracedFleet(folder, *flags, prefill=1, decode=1, router_flags=("--min-remote-tokens=1",))
        with running(fleet):
            yield fleet


def check(spans: list[SeenSpan]) -> None:
    """One tree, from the router's span down to the chunks of the prefill worker's engine."""
    by_id = {span.span_id: span for span in spans}

    def one(name: str, service: str) -> SeenSpan:
        (found,) = [span for span in spans if (span.name, span.service) == (name, service)]
        return found

    root = one("text_completion model", "baton-router")
    way = [
        root,
        one("decode", "baton-router"),
        one("baton.v1.DecodeService/Decode", "baton-decode"),
        one("prefill", "baton-decode"),
        one("baton.v1.PrefillService/Prefill", "baton-prefill"),
    ]
    assert root.parent_id == CALLER
    assert [span.parent_id for span in way[1:]] == [span.span_id for span in way[:-1]]
    assert {span.service: span.protocol for span in spans} == {
        "baton-router": "grpc",
        "baton-decode": "grpc",
        "baton-prefill": "http",
    }
    for span in spans:
        parent = by_id.get(span.parent_id)
        assert span is root or parent is not None, span
        assert span.start_ns <= span.end_ns
        assert parent is None or span.start_ns >= parent.start_ns - SLACK_NS, (span, parent)
    chunks = sorted((span for span in spans if span.name == "prefill chunk"), key=lambda span: span.start_ns)
    assert {span.parent_id for span in chunks} == {way[-1].span_id}
    tokens = [span.attributes["baton.num_tokens"] for span in chunks]
    assert (sum(tokens), len(tokens)) == (NUM_PROMPT_TOKENS, -(-NUM_PROMPT_TOKENS // CHUNK))
    starts = [span.attributes["baton.num_computed_tokens"] for span in chunks]
    assert starts == [sum(tokens[:number]) for number in range(len(tokens))]
    assert all(one.end_ns <= other.start_ns + SLACK_NS for one, other in itertools.pairwise(chunks))
    assert [span for span in spans if span.name == "publish" and span.parent_id == way[-1].span_id]
    transfers = [span for span in spans if span.name == "transfer"]
    assert {span.parent_id for span in transfers} == {way[2].span_id}
    moved = sum(span.attributes["baton.num_blocks"] for span in transfers)
    assert moved == root.attributes["baton.num_blocks_moved"] > 0
    for name in ("queue", "handoff", "first decode", "stream", "decode step"):
        assert one(name, "baton-decode").parent_id == way[2].span_id
    assert root.attributes["gen_ai.usage.input_tokens"] == NUM_PROMPT_TOKENS


def test_one_request_is_one_trace(fleet: TracedFleet) -> None:
    prompt = random_prompt(random.Random(1), NUM_PROMPT_TOKENS)
    trace_id = "a" * 32
    answer = httpx.post(
        f"{fleet.http}/v1/completions",
        json={"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "cache_salt": "rest"},
        headers={"traceparent": f"00-{trace_id}-{CALLER}-01"},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    assert answer.json()["baton"]["prefill_worker"]
    check(fleet.collector.of(trace_id, SERVICES))
    trace_id = "b" * 32
    with grpc.insecure_channel(fleet.grpc) as channel:
        asked = inference_pb2.GenerateRequest(
            prompt_token_ids=prompt,
            cache_salt="grpc",
            sampling_params=types_pb2.SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True),
        )
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        assert list(stub.Generate(asked, metadata=(("traceparent", f"00-{trace_id}-{CALLER}-01"),), timeout=60))
    check(fleet.collector.of(trace_id, SERVICES))
    # One whose caller is not sampled leaves nothing anywhere.
    unseen = httpx.post(
        f"{fleet.http}/v1/completions",
        json={"prompt": prompt, "max_tokens": 2, "cache_salt": "unseen"},
        headers={"traceparent": f"00-{'c' * 32}-{CALLER}-00"},
        timeout=60,
    )
    assert unseen.status_code == 200
    last = httpx.post(
        f"{fleet.http}/v1/completions",
        json={"prompt": prompt, "max_tokens": 2, "cache_salt": "last"},
        headers={"traceparent": f"00-{'d' * 32}-{CALLER}-01"},
        timeout=60,
    )
    assert last.status_code == 200
    fleet.collector.of("d" * 32, SERVICES)
    assert {span.trace_id for span in fleet.collector.spans} == {one * 32 for one in "abd"}


def test_embeddings_are_traced_down_to_the_engine(fleet: TracedFleet) -> None:
    trace_id = "e" * 32
    answer = httpx.post(
        f"{fleet.http}/v1/embeddings",
        json={"input": [random_prompt(random.Random(2), NUM_PROMPT_TOKENS)]},
        headers={"traceparent": f"00-{trace_id}-{CALLER}-01"},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    spans = fleet.collector.of(trace_id, {"baton-router", "baton-prefill"})
    by_name = {span.name: span for span in spans}
    root, call = by_name["embeddings model"], by_name["embed"]
    whole = by_name["baton.v1.EmbedService/EmbedTokens"]
    assert [root.parent_id, call.parent_id, whole.parent_id] == [CALLER, root.span_id, call.span_id]
    chunks = [span for span in spans if span.name == "prefill chunk"]
    assert {span.parent_id for span in chunks} == {whole.span_id}
    assert sum(span.attributes["baton.num_tokens"] for span in chunks) == NUM_PROMPT_TOKENS


def test_a_worker_is_profiled_while_it_serves(
    fleet: TracedFleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address = next(one.address for one in fleet.workers() if one.role is WorkerRole.DECODE)
    prompt = random_prompt(random.Random(3), 40)
    has_ended, answers = threading.Event(), list[tuple[int, ...]]()

    def ask() -> None:
        with fleet.client() as client:
            while not has_ended.is_set():
                options: SamplingOptions = {"temperature": 0.0, "max_tokens": 200, "ignore_eos": True}
                answers.append(tuple(client.generate(prompt, **options).result().token_ids))

    asking = threading.Thread(target=ask)
    asking.start()
    wait_for("an answer came", lambda: answers)
    try:
        code = main(
            [
                "profile",
                "--steps=10",
                f"--worker={address}",
                f"--router={fleet.grpc}",
                f"--out={tmp_path}",
                "--seconds=60",
            ]
        )
    finally:
        has_ended.set()
        asking.join()
    printed = capsys.readouterr()
    assert code == 0, printed.err
    assert len(set(answers)) == 1, "nobody's answer changes"
    stem = address.replace(":", "-")
    events = json.loads(gzip.decompress((tmp_path / f"{stem}.trace.json.gz").read_bytes()))["traceEvents"]
    names = [event["name"] for event in events]
    assert [name.split(":")[0] for name in names if name.startswith("step")] == [f"step {n}" for n in range(1, 11)]
    assert [name for name in names if name.startswith(("aten::", "baton_"))]
    graphs = {path.name for path in tmp_path.iterdir()} - {f"{stem}.trace.json.gz"}
    if find_py_spy() is None:
        assert "py-spy is not installed" in printed.err
    elif "py-spy says" not in printed.err:  # the system may not let it look
        assert graphs == {f"{stem}.engine.svg", f"{stem}.front.svg"}
        assert "engine/process.py" in (tmp_path / f"{stem}.engine.svg").read_text()


def test_a_signal_shows_debug_lines_of_a_worker_and_its_engine(fleet: TracedFleet) -> None:
    process = fleet.members[0].process
    for number in (1, 2):
        process.popen.send_signal(signal.SIGUSR1)
        wait_for("both say so", lambda: process.log.read_text().count("another log level") == 2 * number)  # noqa: B023
    assert process.log.read_text().count("least_severe=debug") == 2
