"""Workers whose KV blocks differ: the router never pairs them, and a pair that somebody names all the same says why not
and computes."""

from __future__ import annotations

import random
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.client.report import FleetWorker
from baton.stack.stack_plan import free_ports
from protos.baton.v1 import decode_pb2, decode_pb2_grpc, types_pb2
from tests.chaos.tiny_model import random_prompt, write_tiny_model
from tests.integration.ask import Salt
from tests.integration.stack import CALL_TIMEOUT_S, Fleet, running

pytestmark = pytest.mark.timeout(600)

ODD = ("block_size", "dtype", "model")


class OddFleet(Fleet):
    """One decode worker; a prefill worker like it, and one for each of `ODD` that differs in just that."""

    def __init__(self, folder: Path) -> None:
        like, other = folder / "model", folder / "other-weights"
        for model_dir in (like, other):
            write_tiny_model(model_dir)
        weights = load_file(other / "model.safetensors")
        weights["model.norm.weight"] = weights["model.norm.weight"] + torch.tensor(0.01)
        save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
        (self.metrics_port,) = free_ports(1)
        self._further = iter(
            (
                (f"--model={like}",),
                (f"--model={like}", "--block-size=32"),
                (f"--model={like}", "--dtype=bfloat16"),
                (f"--model={other}",),
                (f"--model={like}", f"--metrics-port={self.metrics_port}"),
            )
        )
        flags = ("--served-model-name=tiny", "--num-blocks=256", "--connector=shared_storage")
        super().__init__(folder, *flags, prefill=1 + len(ODD), decode=1)
        self.like, *odd = [member for member in self.members if member.role == "prefill"]
        self.odd = dict(zip(ODD, odd, strict=True))
        self.decode = self.members[-1]

    def flags_of(self, address: str) -> Sequence[str]:
        return next(self._further)

    def _unsettled(self, worker: FleetWorker) -> str:
        """The odd ones are fine: what the router says of them instead of "ok" is what this module is about."""
        is_odd = any(worker.address == member.address for member in self.odd.values())
        return super()._unsettled(replace(worker, integrity="ok") if is_odd else worker)

    def num_failures(self) -> float:
        """Prefill streams of the decode worker that were refused as impossible."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        name = 'baton_worker_prefill_failures_total{code="FAILED_PRECONDITION"}'
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OddFleet]:
    fleet = OddFleet(tmp_path_factory.mktemp("fleet"))
    with running(fleet):
        yield fleet


def test_the_router_pairs_none_of_them(fleet: OddFleet, salt: Salt) -> None:
    with fleet.client() as client:
        for number in range(8):
            prompt = random_prompt(random.Random(number), 100)
            result = client.generate(prompt, max_tokens=4, ignore_eos=True, cache_salt=salt()).result()
            assert result.report.prefill_worker == fleet.like.address
            assert not result.report.fallback_reason
    log = fleet.router.log.read_text(errors="replace")
    described = {worker.address: worker.integrity for worker in fleet.workers()}
    for member in fleet.odd.values():
        assert "not used: holds KV of another kind" in described[member.address]
        lines = [line for line in log.splitlines() if member.address in line]
        assert any("KV of another kind" in line for line in lines), member.address
        assert ("Nothing else differs" in described[member.address]) == (member is fleet.odd["dtype"])


@pytest.mark.parametrize("field", ODD)
def test_a_pair_that_somebody_names(fleet: OddFleet, field: str, salt: Salt) -> None:
    """The reason is in the answer, in the decode worker's log with the request's id, and counted."""
    prompt = random_prompt(random.Random(field), 100)
    odd = fleet.odd[field]
    num_failures = fleet.num_failures()
    answers = {}
    with grpc.insecure_channel(fleet.decode.address) as channel:
        stub = decode_pb2_grpc.DecodeServiceStub(channel)
        for name, addresses in ((f"odd-{field}", [odd.address]), (f"alone-{field}", [])):
            request = decode_pb2.DecodeRequest(
                request_id=name,
                prompt_token_ids=prompt,
                sampling_params=types_pb2.SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
                cache_salt=salt(),
                prefill_addresses=addresses,
            )
            events = list(stub.Decode(request, timeout=CALL_TIMEOUT_S))
            tokens = [token.token_id for event in events for token in event.tokens]
            answers[name] = tokens, events[-1].report
    (tokens, report), (expected, alone) = answers.values()
    assert len(tokens) == 8
    assert tokens == expected
    assert report.num_blocks_moved == 0
    assert odd.address in report.fallback_reason
    assert "FAILED_PRECONDITION: KV blocks of fingerprint" in report.fallback_reason
    assert not alone.fallback_reason
    assert fleet.num_failures() == num_failures + 1
    logged = [
        line for line in fleet.decode.process.log.read_text(errors="replace").splitlines() if f"odd-{field}" in line
    ]
    assert any("prefill worker failed" in line for line in logged)
