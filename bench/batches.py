"""What clients notice of a batch that runs beside them: their p99 with it, and without.

    python -m bench.batches [--seconds 60] [--repeats 3] [--rate 0.5] [--tokens 32] [--json FILE] [-- UP OPTIONS]

A stack of one prefill and one decode worker (`baton up`), a client that sends chats at drawn times (Poisson), and a
batch that has more lines than can be answered. Both take turns; the bar is for the p99 of whole answers, of all runs
together. Lines make way when a chat comes: how many were answered between the chats is told, too. Exits with 1 if the
bar is missed, or an answer fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from bench.load.percentiles import percentile
from bench.measure import interleave, print_table
from bench.processes import running

ALONE, BESIDE = "alone", "beside a batch"
BAR = 1.05
CHAT = "/v1/chat/completions"
NUM_LINES = 2_000


@dataclass(slots=True, frozen=True)
class Times:
    first_s: float
    whole_s: float


@dataclass(slots=True)
class Load:
    url: str
    args: argparse.Namespace
    times: dict[str, list[Times]] = field(default_factory=lambda: {ALONE: [], BESIDE: []})
    num_runs: int = 0

    def measure(self, name: str) -> Mapping[str, float]:
        self.num_runs += 1
        return asyncio.run(self._measure(name))

    async def _measure(self, name: str) -> Mapping[str, float]:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=self.url, timeout=600, limits=limits) as client:
            batch_id = await self._begin_batch(client) if name == BESIDE else ""
            begin = time.monotonic()
            found = await self._chats(client)
            elapsed_s = time.monotonic() - begin
            num_lines = await self._end_batch(client, batch_id) if batch_id else 0
        if self.num_runs > 2:  # the first of each is a warm-up
            self.times[name] += found
        firsts, wholes = [1000 * one.first_s for one in found], [1000 * one.whole_s for one in found]
        told = {
            "first token p50, ms": percentile(firsts, 0.5),
            "first token p99, ms": percentile(firsts, 0.99),
            "whole p50, ms": percentile(wholes, 0.5),
            "whole p99, ms": percentile(wholes, 0.99),
            "chats": len(found),
        }
        return {**told, "lines a second": num_lines / elapsed_s} if batch_id else told

    async def _chats(self, client: httpx.AsyncClient) -> list[Times]:
        """Those of one run, each of which comes when it is due, whatever became of the others."""
        draw = random.Random((self.num_runs - 1) // 2)  # both systems have the same times
        begin, due_s = time.monotonic(), 0.0
        tasks: list[asyncio.Task[Times]] = []
        while (due_s := due_s + draw.expovariate(self.args.rate)) < self.args.seconds or not tasks:
            await asyncio.sleep(max(0.0, begin + due_s - time.monotonic()))
            tasks.append(asyncio.create_task(self._chat(client, f"{self.num_runs} {len(tasks)}")))
        return await asyncio.gather(*tasks)

    async def _chat(self, client: httpx.AsyncClient, name: str) -> Times:
        body = {**self._body(name, self.args.tokens), "stream": True}
        begin, first_s = time.monotonic(), None
        async with client.stream("POST", CHAT, json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if first_s is None and '"content":"' in line and '"content":""' not in line:
                    first_s = time.monotonic() - begin
                if "error" in line[:20]:
                    raise RuntimeError(f"a chat failed: {line}")
        whole_s = time.monotonic() - begin
        return Times(whole_s if first_s is None else first_s, whole_s)

    def _body(self, name: str, num_tokens: int) -> dict[str, object]:
        text = f"{name}: " + "Tell a story. " * (self.args.prompt_words // 3)
        messages = [{"role": "user", "content": text}]
        return {"messages": messages, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}

    async def _begin_batch(self, client: httpx.AsyncClient) -> str:
        lines = [
            {"custom_id": str(one), "method": "POST", "url": CHAT, "body": self._body(name, self.args.line_tokens)}
            for one, name in enumerate([f"line {self.num_runs} {one}" for one in range(self.args.lines)])
        ]
        data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        file = await client.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"})
        file.raise_for_status()
        body = {"input_file_id": file.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
        batch = await client.post("/v1/batches", json=body)
        batch.raise_for_status()
        batch_id = str(batch.json()["id"])
        await self._until(client, batch_id, "in_progress")
        return batch_id

    async def _end_batch(self, client: httpx.AsyncClient, batch_id: str) -> int:
        """How many lines have an answer."""
        (await client.post(f"/v1/batches/{batch_id}/cancel")).raise_for_status()
        counts = (await self._until(client, batch_id, "cancelled"))["request_counts"]
        if counts["failed"] or counts["completed"] == counts["total"]:
            raise RuntimeError(f"lines failed, or were too few: {counts}")
        return int(counts["completed"])

    async def _until(self, client: httpx.AsyncClient, batch_id: str, status: str) -> dict[str, Any]:
        while True:
            batch: dict[str, Any] = (await client.get(f"/v1/batches/{batch_id}")).json()
            if batch["status"] == status:
                return batch
            if batch["status"] in ("failed", "completed", "expired"):
                raise RuntimeError(f"the batch is {batch['status']}: {batch['errors']}")
            await asyncio.sleep(0.05)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.batches", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rate", type=float, default=0.5, help="chats a second")
    parser.add_argument("--tokens", type=int, default=32, help="of each chat's answer")
    parser.add_argument("--prompt-words", type=int, default=60, help="of each prompt")
    parser.add_argument("--line-tokens", type=int, default=64, help="of each line's answer")
    parser.add_argument("--lines", type=int, default=NUM_LINES, help="of a batch")
    parser.add_argument("--json", type=Path, help="the times of every chat")
    parser.add_argument("up", nargs="*", help="options of `baton up`, after --")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--http-port=0", "--grpc-port=0", "--log-level=warning", "--max-restarts=0"]
        kept = f"--batch-file={folder}/batches.db"
        command = [sys.executable, "-m", "baton", "up", "--num-threads=1", *flags, kept, *args.up]
        with running(command, "baton up") as fields:
            load = Load(fields["http"], args)
            rows = interleave({name: partial(load.measure, name) for name in (ALONE, BESIDE)}, args.repeats)
    print_table("Chats: medians of runs, from … to", rows, ratio=(BESIDE, ALONE))
    is_missed = False
    for what in ("first_s", "whole_s"):
        p99 = {name: percentile([getattr(one, what) for one in found], 0.99) for name, found in load.times.items()}
        ratio = p99[BESIDE] / p99[ALONE]
        verdict = ""
        if what == "whole_s":
            is_missed = ratio > BAR
            verdict = f" (bar {BAR:g}: {'MISSED' if is_missed else 'met'})"
        words = {"first_s": "first token", "whole_s": "whole answer"}[what]
        print(f"p99 of the {words}: {1000 * p99[BESIDE]:.0f} / {1000 * p99[ALONE]:.0f} ms = {ratio:.3f}{verdict}")
    if args.json:
        times = {name: [[one.first_s, one.whole_s] for one in found] for name, found in load.times.items()}
        args.json.write_text(json.dumps(times) + "\n")
    return 1 if is_missed else 0


if __name__ == "__main__":
    sys.exit(main())
