"""vLLM's engine as a peer of bench/engine.py, in an environment that has it: one JSON object per line in, one out.

    PYTHON bench/vllm_peer.py MODEL_DIR DTYPE MAX_CONTEXT KV_BYTES

{"batch": sequences, "context": tokens, "steps": tokens, "chunk": tokens} is answered with {"seconds": s}: of a prompt
to its first token if there are no steps, else of so many tokens of each sequence, each beside a prompt of `chunk`
tokens if that is not 0. vLLM's own DecodeBenchConnector fills contexts with a constant, outside the clock. Engine and
model are in this one process, so no message between processes counts; threads are as OMP_NUM_THREADS says.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import TYPE_CHECKING, Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.decode_bench_connector import DecodeBenchConnector
from vllm.sampling_params import RequestOutputKind

if TYPE_CHECKING:
    from vllm.v1.request import Request

_MAX_NEW = 64  # tokens of a sequence


class FillingConnector(DecodeBenchConnector):  # type: ignore[misc]
    """Fills the contexts of those requests that ask for it."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        if not request.kv_transfer_params:
            return 0, False
        found: tuple[int | None, bool] = super().get_num_new_matched_tokens(request, num_computed_tokens)
        return found


class Peer:
    def __init__(self, model_dir: str, dtype: str, max_context: int, kv_bytes: int) -> None:
        connector = {
            "kv_connector": FillingConnector.__name__,
            "kv_connector_module_path": __name__,  # __main__: engine and model are in this process
            "kv_role": "kv_both",
        }
        self._engine = LLM(
            model_dir,
            dtype=dtype,
            skip_tokenizer_init=True,
            max_model_len=max_context + _MAX_NEW,
            max_num_batched_tokens=4096,
            kv_cache_memory_bytes=kv_bytes,
            enable_prefix_caching=False,
            kv_transfer_config=connector,
        ).llm_engine
        self._num_requests = 0

    def measure(self, batch: int, context: int, steps: int, chunk: int) -> float:
        start = time.perf_counter()
        names = [self._add(context, is_filled=steps > 0) for _ in range(batch)]
        self._step(batch)
        if steps:
            start = time.perf_counter()
            for _ in range(steps):
                if chunk:
                    names.append(self._add(chunk, is_filled=False, num_new=1))
                self._step(batch + bool(chunk))
        seconds = time.perf_counter() - start
        self._engine.abort_request(names)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return seconds

    def _add(self, context: int, *, is_filled: bool, num_new: int = _MAX_NEW) -> str:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=num_new,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"kv_transfer_params": {"is_filled": True}} if is_filled else None,
        )
        prompt = {"prompt_token_ids": [100 + i * 7919 % 40_000 for i in range(context)]}
        self._num_requests += 1
        self._engine.add_request(name := str(self._num_requests), prompt, params)
        return name

    def _step(self, batch: int) -> None:
        """Gives one token to each sequence."""
        num_tokens = sum(len(one.outputs[0].token_ids) for one in self._engine.step())
        if num_tokens != batch:
            raise RuntimeError(f"a step gave {num_tokens} tokens to {batch} sequences")


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM's own lines
    model_dir, dtype, max_context, kv_bytes = sys.argv[1:]
    peer = Peer(model_dir, dtype, int(max_context), int(kv_bytes))

    def answer(given: dict[str, Any]) -> None:
        print(json.dumps(given), file=answers, flush=True)

    answer({"ready": True})
    for line in sys.stdin:
        answer({"seconds": peer.measure(**json.loads(line))})


if __name__ == "__main__":
    main()
