"""The browser that benchmarks open, if it does not do as it should."""

from __future__ import annotations

import asyncio
from pathlib import Path

from bench.browser import browser


def test_a_browser_that_does_not_end_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "chromium"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o755)

    async def opens() -> int:
        async with browser(str(program), end_s=0.05) as opened:
            return opened.pid

    assert not Path(f"/proc/{asyncio.run(opens())}").exists()
