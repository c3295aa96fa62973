"""Local stacks, started as a user would, and a client of each."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from bench.kv.client import Prompts, StackClient
from bench.kv.settings import BenchSettings
from bench.processes import running_stack

WARM_UP_TOKENS = (64, 600)
NUM_BLOCKS = 1024  # of each worker: twice a prompt of 8,192 tokens, whatever the model


@contextlib.contextmanager
def stack(
    settings: BenchSettings, *arguments: str, model: str | None = None, num_blocks: int = NUM_BLOCKS
) -> Iterator[StackClient]:
    """`baton up` with `arguments`, warmed up. Raises `StartupError`."""
    base = [
        f"--model={model or settings.model}",
        f"--dtype={settings.dtype}",
        f"--cache-dir={settings.cache_dir}",
        f"--num-blocks={num_blocks}",
    ]
    with running_stack([*base, *arguments]) as address, contextlib.closing(StackClient(address)) as client:
        prompts = Prompts(settings.seed, "warm-up")
        for num_tokens in WARM_UP_TOKENS:
            client.generate(prompts.new(num_tokens), 4)
        yield client
