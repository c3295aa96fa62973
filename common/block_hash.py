"""Names of KV blocks: what a block holds decides what it is called.

`hash = H(parent_hash, token_ids, extra_keys)`, chained from a root that commits to the weights and the KV layout.
Equal hashes mean equal bytes, in any process, on any machine, in any Python version. BLAKE2b with 128 bits.
"""

from __future__ import annotations

import functools
import hashlib
from array import array
from collections.abc import Sequence

HASH_BYTES = 16


@functools.lru_cache(64)
def root_hash(fingerprint: str) -> bytes:
    """Where every chain of one model and KV layout starts."""
    return hashlib.blake2b(fingerprint.encode(), digest_size=HASH_BYTES, person=b"baton-root").digest()


def block_hash(parent: bytes, token_ids: Sequence[int], extra_keys: tuple[str, ...] = ()) -> bytes:
    """Name of the block that holds `token_ids` (a whole block, or the tail of a prompt) after `parent`.

    `extra_keys` are what else the KV depends on, in a fixed order: LoRA id, multimodal content hash, cache salt.
    """
    return _named(parent, len(token_ids), _token_bytes(token_ids), _extra_bytes(extra_keys))


def block_hashes(
    root: bytes, token_ids: Sequence[int], block_size: int, extra_keys: tuple[str, ...] = (), *, partial: bool = False
) -> list[bytes]:
    """Names of the full blocks of `token_ids`, in order; with `partial` also of a tail shorter than a block."""
    hashes: list[bytes] = []
    parent, tokens, extra = root, _token_bytes(token_ids), _extra_bytes(extra_keys)
    stop = len(token_ids) if partial else len(token_ids) - len(token_ids) % block_size
    for start in range(0, stop, block_size):
        size = min(block_size, stop - start)
        parent = _named(parent, size, tokens[4 * start : 4 * (start + size)], extra)
        hashes.append(parent)
    return hashes


def extra_keys(*, lora_id: str = "", content_hash: str = "", cache_salt: str = "") -> tuple[str, ...]:
    """The extra keys of a request, empty if there is nothing extra; each names its kind."""
    named = (("lora", lora_id), ("content", content_hash), ("salt", cache_salt))
    return tuple(f"{kind}:{value}" for kind, value in named if value)


def _named(parent: bytes, num_tokens: int, tokens: bytes, extra: bytes) -> bytes:
    content = parent + num_tokens.to_bytes(4, "little") + tokens + extra
    return hashlib.blake2b(content, digest_size=HASH_BYTES, person=b"baton-block").digest()


def _token_bytes(token_ids: Sequence[int]) -> bytes:
    """4 bytes for each, little-endian."""
    ids = array("I", token_ids)  # 4 bytes each on every platform that CPython supports
    if ids.itemsize != 4:
        raise RuntimeError("array('I') does not have 4-byte items on this platform")
    if not _LITTLE_ENDIAN:
        ids.byteswap()
    return ids.tobytes()


def _extra_bytes(extra_keys: tuple[str, ...]) -> bytes:
    return b"".join(len(data).to_bytes(4, "little") + data for data in (key.encode() for key in extra_keys))


_LITTLE_ENDIAN = array("I", [1]).tobytes()[0] == 1
