"""`engine.process` with requests admitted between steps only: what `bench.admission` compares with."""

from __future__ import annotations

import sys

from engine import process


class _LateLoop(process._Loop):
    def _pass_messages(self) -> None:
        """Does what `_Loop` does, without `EngineCore.begin_remote`."""
        self._commands.hand_to(self._core)
        self._core.take_in_transfers()
        self._send()


if __name__ == "__main__":
    process._Loop = _LateLoop  # type: ignore[misc]
    sys.exit(process.main())
