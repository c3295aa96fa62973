"""What the router knows of workers' blocks, against a plain model of it."""

from __future__ import annotations

from collections.abc import Sequence

import hypothesis.strategies as st
from hypothesis import given, settings

from common.block_hash import block_hashes, root_hash
from router.fleet.prefix_index import EXPECTED_S, PrefixIndex

ROOT = root_hash("f")
NAMES = block_hashes(ROOT, list(range(40)), 4)
OTHERS = block_hashes(ROOT, list(range(100, 140)), 4)


def joined(names: Sequence[bytes]) -> bytes:
    return b"".join(names)


def index_of(**workers: Sequence[bytes]) -> PrefixIndex:
    index = PrefixIndex()
    for worker, names in workers.items():
        index.reset(worker)
        assert index.store(worker, joined(names))
    return index


def swept(index: PrefixIndex) -> None:
    while index.sweep(3):
        pass


def test_leading_blocks_of_each_worker() -> None:
    index = index_of(a=NAMES[:7], b=NAMES[:2], c=NAMES, d=OTHERS)
    assert index.match(NAMES, 0) == {"a": 7, "b": 2, "c": 10}
    assert index.match(NAMES[:1], 0) == {"a": 1, "b": 1, "c": 1}
    assert index.match([*NAMES[:3], *OTHERS], 0) == {"a": 3, "b": 2, "c": 3}
    assert index.match([], 0) == index.match([b"?" * 16], 0) == {}


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["store", "cut", "reset", "forget", "sweep"]),
                          st.integers(0, 10), st.booleans()), max_size=40))  # fmt: skip
def test_it_is_what_a_list_of_each_worker_would_be(steps: list[tuple[int, str, int, bool]]) -> None:
    """Workers get prompts' beginnings and lose their ends, come and go."""
    index, model = PrefixIndex(), dict[str, tuple[int, int]]()
    for number, action, depth, is_other in steps:
        worker = f"w{number}"
        names, which = (OTHERS, 1) if is_other else (NAMES, 0)
        if action == "reset" or (action != "forget" and worker not in model):
            index.reset(worker)
            model[worker] = (0, 0)
        elif action == "forget":
            index.forget(worker)
            model.pop(worker, None)
        elif action == "store":
            index.store(worker, joined(names[:depth]))
            depths = list(model[worker])
            depths[which] = max(depths[which], depth)
            model[worker] = (depths[0], depths[1])
        elif action == "cut":
            index.remove(worker, joined(names[depth:]))
            depths = list(model[worker])
            depths[which] = min(depths[which], depth)
            model[worker] = (depths[0], depths[1])
        else:
            index.sweep(depth)
        for which, names in enumerate((NAMES, OTHERS)):
            expected = {worker: depths[which] for worker, depths in model.items() if depths[which]}
            assert index.match(names, 0) == expected
        assert {worker: index.num_blocks(worker) for worker in model} == {w: sum(d) for w, d in model.items()}
    for worker in model:
        index.forget(worker)
    swept(index)
    assert len(index) == 0


def test_who_comes_after_a_worker_that_is_gone_does_not_inherit() -> None:
    index = index_of(a=NAMES)
    index.forget("a")
    index.reset("b")
    assert index.match(NAMES, 0) == {}
    swept(index)
    index.reset("c")
    index.store("c", joined(NAMES[:1]))
    assert index.match(NAMES, 0) == {"c": 1}
    assert len(index) == 1


def test_blocks_are_expected_for_a_while() -> None:
    index = index_of(a=NAMES[:2], b=[])
    index.expect("b", NAMES[:5], now=0)
    assert index.match(NAMES, 1) == {"a": 2, "b": 5}
    assert index.match(NAMES, EXPECTED_S) == {"a": 2}
    index.expect("nobody", NAMES, now=0)
    assert index.match(NAMES, EXPECTED_S) == {"a": 2}


def test_a_gap_ends_what_counts() -> None:
    assert index_of(a=[*NAMES[:4], *NAMES[5:8]]).match(NAMES, 0) == {"a": 4}


def test_a_worker_cannot_fill_the_memory() -> None:
    index = PrefixIndex(max_blocks_per_worker=4, max_expected=4)
    index.reset("a")
    assert not index.store("a", joined(NAMES))
    assert (len(index), index.num_blocks("a")) == (4, 4)
    index.remove("a", joined(NAMES))
    assert len(index) == 0
    index.expect("a", NAMES[:4], 0)
    index.expect("a", NAMES, 0)
    index.expect("a", NAMES[:1], 0)  # known already, and more memory all the same
    assert index.match(NAMES, 0) == {"a": 4}
    assert len(index._expectations) == 1
    assert index.match(NAMES, EXPECTED_S) == {}
    index.expect("a", NAMES[:3], EXPECTED_S)
    assert index.match(NAMES, EXPECTED_S) == {"a": 3}
