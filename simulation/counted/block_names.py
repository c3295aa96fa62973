"""Names of KV blocks by the runs of a prompt, for simulations that have no tokens. Pure.

A block is named by the chain of runs up to the one in which it ends, and by its number. As with real names
(`common.block_hash`), equal names mean equal tokens, those before the block included, on every machine.

    runs     (0, 64) (17, 512)            a name is    H(H(root, 0, run 0), 64, run 17) + number of the block
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from common.block_hash import HASH_BYTES
from common.traffic.requests import Run, answer_id

NUMBER_BYTES = 4
CHAIN_BYTES = HASH_BYTES - NUMBER_BYTES
ROOT = bytes(CHAIN_BYTES)


def names_of(runs: Sequence[Run], block_size: int) -> tuple[list[bytes], bytes]:
    """Names of the full blocks of a prompt, and the chain of its answer: `name_in_answer`."""
    names: list[bytes] = []
    chain, run_id, length, stop = ROOT, -1, 0, 0
    for next_id, num_tokens in runs:
        if next_id != run_id:
            chain = _next(chain, length, next_id)
            run_id, length = next_id, 0
        length += num_tokens
        stop += num_tokens
        for number in range(len(names), stop // block_size):
            names.append(chain + number.to_bytes(NUMBER_BYTES, "big"))
    return names, _next(chain, length, answer_id(run_id))


def name_in_answer(chain: bytes, number: int) -> bytes:
    """Of the block with this number, which ends in the answer."""
    return chain + number.to_bytes(NUMBER_BYTES, "big")


def _next(chain: bytes, num_tokens: int, run_id: int) -> bytes:
    content = chain + num_tokens.to_bytes(8, "big") + run_id.to_bytes(8, "big")
    return hashlib.blake2b(content, digest_size=CHAIN_BYTES).digest()
