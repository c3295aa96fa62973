"""One request to a running stack, with the times at which its tokens came."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass

import grpc

from common.errors import TransferError
from protos.baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2

_FIRST_ID, _LAST_ID = 100, 40_000  # token ids of random prompts: no special ones


@dataclass(slots=True, frozen=True)
class Timed:
    """Times in milliseconds, as the client saw them."""

    start: float  # time.perf_counter()
    marks: tuple[float, ...]  # since `start`, of each token
    report: types_pb2.RequestReport

    @property
    def ttft_ms(self) -> float:
        return self.marks[0]

    @property
    def itl_ms(self) -> list[float]:
        """Time between each token and the one before it."""
        return [after - before for before, after in zip(self.marks, self.marks[1:], strict=False)]

    @property
    def step_ms(self) -> float:
        """One decode step: the median time between tokens, from the second token on."""
        return statistics.median(self.itl_ms[1:])

    @property
    def exposed_ms(self) -> float:
        """What the handoff adds between first and second token. Below zero if the step was a fast one."""
        return self.itl_ms[0] - self.step_ms


class StackClient:
    """A client of a stack that any number of threads may use."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)

    def generate(self, prompt: list[int], num_new: int) -> Timed:
        """Raises `TransferError` if the answer is not whole, or if its KV did not arrive."""
        request = inference_pb2.GenerateRequest(
            prompt_token_ids=prompt,
            sampling_params=types_pb2.SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True),
        )
        start = time.perf_counter()
        marks: list[float] = []
        report = types_pb2.RequestReport()
        try:
            for message in self._stub.Generate(request):
                marks += [(time.perf_counter() - start) * 1000] * len(message.token_ids)
                if message.HasField("report"):
                    report = message.report
        except grpc.RpcError as error:
            raise TransferError(f"a request failed: {error.code().name}: {error.details()}") from error
        if len(marks) != num_new:
            raise TransferError(f"{len(marks)} tokens instead of {num_new}")
        if report.fallback_reason:
            raise TransferError(f"KV did not arrive: {report.fallback_reason}")
        return Timed(start, tuple(marks), report)

    def max_model_len(self) -> int:
        models = self._stub.ListModels(inference_pb2.ListModelsRequest()).models
        return int(models[0].max_model_len)

    def close(self) -> None:
        self._channel.close()


class Prompts:
    """Random prompts, none twice, so that no prefix cache helps. Other `use`, other prompts."""

    def __init__(self, seed: int, use: str) -> None:
        self._random = random.Random(f"{use} {seed}")

    def new(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(_FIRST_ID, _LAST_ID) for _ in range(num_tokens)]
