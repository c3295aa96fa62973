"""The prefix cache of the device: which block holds the content of which name. Pure.

A full block is named by the hash of its tokens and of all tokens before them (`common.block_hash`), so equal names mean
equal bytes. Of several equal blocks one has the name. A block keeps its name until it is evicted.
"""

from __future__ import annotations

from collections.abc import KeysView, Sequence

from common.block_hash import block_hash
from engine.request import Request


class PrefixCache:
    def __init__(self, block_size: int, root_hash: bytes, *, is_enabled: bool = True) -> None:
        """If it is not enabled, no block has a name and nothing is found."""
        self.is_enabled = is_enabled
        self._block_size = block_size
        self._root_hash = root_hash
        self._by_name: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}  # by block

    def __contains__(self, name: bytes) -> bool:
        return name in self._by_name

    def __getitem__(self, name: bytes) -> int:
        return self._by_name[name]

    def find(self, name: bytes) -> int | None:
        """The block of this name, if the device has it."""
        return self._by_name.get(name)

    def names(self) -> KeysView[bytes]:
        return self._by_name.keys()

    def has_name(self, block_id: int) -> bool:
        return block_id in self._names

    def name_of(self, block_id: int) -> bytes:
        """The name of a block that has one."""
        return self._names[block_id]

    def put(self, block_id: int, name: bytes) -> bool:
        """Names a block. Returns False and changes nothing if the block has a name or the name has a block."""
        if block_id in self._names or name in self._by_name:
            return False
        self._by_name[name] = block_id
        self._names[block_id] = name
        return True

    def remove(self, block_id: int) -> bytes | None:
        """Takes the block's name away, and returns it."""
        name = self._names.pop(block_id, None)
        if name is not None:
            del self._by_name[name]
        return name

    def clear(self) -> None:
        self._by_name.clear()
        self._names.clear()

    # ------------------------------------------------------------------------------- names of a request's blocks

    def name_full_blocks(self, request: Request) -> None:
        """Extends `request.block_hashes` to all full blocks of its tokens."""
        hashes, size = request.block_hashes, self._block_size
        while (len(hashes) + 1) * size <= request.num_tokens:
            hashes.append(self._hash_of(request, len(hashes), (len(hashes) + 1) * size))

    def tail_hash(self, request: Request) -> bytes:
        """Name of the prompt's last block, if the prompt fills it only in part."""
        self.name_full_blocks(request)
        return self._hash_of(request, request.num_prompt_tokens // self._block_size, request.num_prompt_tokens)

    def name_in_prompt(self, request: Request, index: int) -> bytes:
        """Name under which a prefill worker publishes block `index` of the prompt, full or the tail."""
        if (index + 1) * self._block_size > request.num_prompt_tokens:
            return self.tail_hash(request)
        self.name_full_blocks(request)
        return request.block_hashes[index]

    def findable(self, request: Request) -> Sequence[bytes]:
        """Names of the full blocks that need not be computed. At least one token has to be: only a computed token gives
        logits."""
        if not self.is_enabled:
            return ()
        self.name_full_blocks(request)
        if request.needs_every_token:
            return ()
        return request.block_hashes[: (request.num_tokens - 1) // self._block_size]

    def _hash_of(self, request: Request, index: int, stop: int) -> bytes:
        parent = request.block_hashes[index - 1] if index else self._root_hash
        return block_hash(parent, request.token_ids[index * self._block_size : stop], request.extra_keys)

    # -------------------------------------------------------------------------------------------- integrity

    def check_integrity(self) -> list[str]:
        """What is wrong; empty if every name finds the block that has it."""
        if len(self._by_name) != len(self._names):
            return [f"{len(self._by_name)} names find {len(self._names)} blocks"]
        return [
            f"block {block_id} has a name that finds another block"
            for block_id, name in self._names.items()
            if self._by_name.get(name) != block_id
        ]
