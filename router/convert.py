"""What a router alone converts; `protos.convert` has what all services share."""

from __future__ import annotations

from common.types import SamplingParams, WorkerLoad
from common.validation import SamplingFields
from protos.baton.v1 import types_pb2, worker_pb2


def load_of(load: worker_pb2.WorkerLoad) -> WorkerLoad:
    return WorkerLoad(
        num_requests_running=load.num_requests_running,
        num_requests_waiting=load.num_requests_waiting,
        num_queued_prompt_tokens=load.num_queued_prompt_tokens,
        num_blocks=load.num_blocks,
        num_free_blocks=load.num_free_blocks,
        num_cached_blocks=load.num_cached_blocks,
        num_leases=load.num_leases,
    )


def sampling_fields_of(params: types_pb2.SamplingParams) -> SamplingFields:
    """What the client set, and nothing else."""

    def given(name: str) -> bool:
        return params.HasField(name)  # type: ignore[arg-type]

    return SamplingFields(
        temperature=params.temperature if given("temperature") else None,
        top_p=params.top_p if given("top_p") else None,
        top_k=params.top_k if given("top_k") else None,
        min_p=params.min_p if given("min_p") else None,
        seed=params.seed if given("seed") else None,
        max_tokens=params.max_tokens if given("max_tokens") else None,
        min_tokens=params.min_tokens if given("min_tokens") else None,
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
        ignore_eos=params.ignore_eos if given("ignore_eos") else None,
        logprobs=params.logprobs if given("logprobs") else None,
        presence_penalty=params.presence_penalty if given("presence_penalty") else None,
        frequency_penalty=params.frequency_penalty if given("frequency_penalty") else None,
        repetition_penalty=params.repetition_penalty if given("repetition_penalty") else None,
        logit_bias=dict(params.logit_bias),
    )


def sampling_to_proto(params: SamplingParams) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        seed=params.seed,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        stop=params.stop,
        stop_token_ids=params.stop_token_ids,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=params.repetition_penalty,
        logit_bias=params.logit_bias,
    )
