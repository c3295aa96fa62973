from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from common.errors import IncompatibleError, TransferError
from kv_store.base import BlockRef
from kv_store.peers import PeerInfo, check_compatible, decode_peer, encode_peer, join_peers, join_refs
from kv_store.shards import shard_of
from tests.kv_store.conformance import WIDE_SPEC


def rank_of(tp_size: int, rank: int, **changes: object) -> bytes:
    info = PeerInfo(
        connector="c",
        name="w",
        epoch="e",
        spec=shard_of(WIDE_SPEC, tp_size, rank),
        num_blocks=8,
        transports={rank: bytes([rank])},
    )
    return encode_peer(msgspec.structs.replace(info, **changes))


def test_a_worker_is_its_ranks() -> None:
    joined = decode_peer(join_peers([rank_of(4, rank) for rank in (2, 0, 3, 1)]))
    assert joined.transports == {rank: bytes([rank]) for rank in range(4)}
    needed = check_compatible("c", shard_of(WIDE_SPEC, 2, 1), joined)
    assert [(part.rank, part.local_head, part.num_heads) for part in needed] == [(2, 0, 1), (3, 1, 1)]


@pytest.mark.parametrize(
    "changes",
    [{"name": "x"}, {"epoch": "x"}, {"num_blocks": 9}, {"spec": shard_of(WIDE_SPEC, 4, 1)}, {"connector": "x"}],
)
def test_ranks_of_different_workers(changes: dict[str, object]) -> None:
    with pytest.raises(IncompatibleError, match="another worker"):
        join_peers([rank_of(2, 0), rank_of(2, 1, **changes)])


def test_no_ranks_and_garbage() -> None:
    with pytest.raises(IncompatibleError, match="no ranks"):
        join_peers([])
    with pytest.raises(TransferError, match="peer"):
        join_peers([b"garbage"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model_id", "x"),
        ("num_layers", 9),
        ("num_planes", 1),
        ("num_kv_heads", 2),
        ("head_dim", 9),
        ("block_size", 9),
        ("dtype", "float16"),
    ],
)
def test_every_difference_is_named(field: str, value: Any) -> None:
    spec = shard_of(replace(WIDE_SPEC, **{field: value}), 2, 0)
    with pytest.raises(IncompatibleError, match=rf"{field} {value!r} \(here {getattr(WIDE_SPEC, field)!r}\)$"):
        check_compatible("c", WIDE_SPEC, decode_peer(rank_of(2, 0, spec=spec)))


def test_a_peer_of_other_layers_is_refused() -> None:
    """Workers of one stage each may exchange blocks, in any tensor-parallel degree; others may not yet."""
    num_layers = WIDE_SPEC.num_layers
    stage = shard_of(WIDE_SPEC, 1, 0, range(1, num_layers))
    peer = decode_peer(rank_of(2, 0, spec=shard_of(WIDE_SPEC, 2, 0, range(1, num_layers)), transports={0: b"", 1: b""}))
    assert [(part.rank, part.num_layers) for part in check_compatible("c", stage, peer)] == [
        (0, num_layers - 1),
        (1, num_layers - 1),
    ]
    last = num_layers - 1
    with pytest.raises(IncompatibleError, match=rf"other layers: 1 to {last} \(here 0 to {last}\) of {num_layers}$"):
        check_compatible("c", WIDE_SPEC, peer)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"spec": replace(WIDE_SPEC, num_kv_heads=-WIDE_SPEC.num_kv_heads, tp_size=-1)}, "num_kv_heads is -"),
        ({"spec": replace(WIDE_SPEC, num_kv_heads=0, tp_size=0)}, "num_kv_heads is 0"),
        ({"spec": replace(WIDE_SPEC, tp_size=2**40)}, "tp_size is 1099511627776"),
        ({"spec": replace(WIDE_SPEC, tp_size=2, tp_rank=2)}, "2 is not a rank of 2"),
        ({"spec": replace(WIDE_SPEC, tp_size=2, tp_rank=-1)}, "-1 is not a rank of 2"),
        ({"transports": {5: b""}}, "5 is not a rank of 1"),
        ({"spec": replace(WIDE_SPEC, first_layer=1)}, "are not layers of a model of"),
        (
            {"spec": replace(WIDE_SPEC, first_layer=-1, num_layers_of_whole=9)},
            "-1 to .* are not layers of a model of 9",
        ),
        ({"spec": replace(WIDE_SPEC, num_layers_of_whole=2**40)}, "are not layers of a model of"),
        ({"num_blocks": 0}, "num_blocks is 0"),
        ({"num_blocks": 2**60}, "num_blocks is 1152921504606846976"),
    ],
)
def test_numbers_that_no_worker_has(changes: dict[str, object], words: str) -> None:
    """The first two have as many heads as we have, all in all."""
    with pytest.raises(TransferError, match=words):
        check_compatible("c", WIDE_SPEC, decode_peer(rank_of(1, 0, **changes)))


def test_one_reference_for_all_ranks() -> None:
    refs = [
        BlockRef(
            index=3, block_hash=b"h", peer="w", epoch="e", block_id=7, checksums=(rank, rank + 10), staged_slots=(rank,)
        )
        for rank in range(2)
    ]
    assert join_refs(refs) == msgspec.structs.replace(refs[0], checksums=(0, 10, 1, 11), staged_slots=(0, 1))
    with pytest.raises(ValueError, match="different blocks"):
        join_refs([refs[0], msgspec.structs.replace(refs[1], block_id=8)])
