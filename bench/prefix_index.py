"""The router's index of KV blocks: time of one lookup, bytes of a block. `python -m bench.prefix_index`."""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time

from common.block_hash import HASH_BYTES, block_hashes, root_hash
from router.fleet.prefix_index import PrefixIndex

PROMPT_BLOCKS = 512  # 8,192 tokens in blocks of 16


def rss_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, default=8)
    args = parser.parse_args()
    draw = random.Random(0)
    index, workers = PrefixIndex(), [f"worker-{number}" for number in range(args.workers)]
    for worker in workers:
        index.reset(worker)
    prompts = []
    before, start = rss_bytes(), time.perf_counter()
    while len(index) < args.blocks:
        names = draw.randbytes(PROMPT_BLOCKS * HASH_BYTES)
        prompts.append(names)
        for worker in draw.sample(workers, min(3, len(workers))):
            depth = draw.choice((PROMPT_BLOCKS, draw.randrange(1, PROMPT_BLOCKS)))
            index.store(worker, names[: depth * HASH_BYTES])
    took = time.perf_counter() - start
    size = rss_bytes() - before - len(prompts) * PROMPT_BLOCKS * HASH_BYTES
    asked = [
        [names[at : at + HASH_BYTES] for at in range(0, len(names), HASH_BYTES)] for names in draw.sample(prompts, 500)
    ]
    times = []
    for asked_names in asked:
        start = time.perf_counter()
        index.match(asked_names, 0.0)
        times.append(1e6 * (time.perf_counter() - start))
    times.sort()
    hashing = []
    for _ in range(20):
        start = time.perf_counter()
        block_hashes(root_hash("f"), range(PROMPT_BLOCKS * 16), 16)
        hashing.append(1e6 * (time.perf_counter() - start))
    print(
        f"{len(index):,} blocks on {len(workers)} workers: {size / len(index):.0f} bytes a block, built in {took:.1f} s"
    )
    p50, p99 = statistics.median(times), times[int(len(times) * 0.99)]
    print(f"a lookup of {PROMPT_BLOCKS} blocks: p50 {p50:.0f} us, p99 {p99:.0f} us")
    print(f"hashing {PROMPT_BLOCKS * 16} tokens: {min(hashing):.0f} us")


if __name__ == "__main__":
    main()
