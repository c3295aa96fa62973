"""How long steps take, the host's part of each included."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class HostTime:
    """Seconds between two steps, in which the device waits for the engine."""

    step_s: float = 0.0
    request_s: float = 0.0  # more for each request of the step

    def seconds(self, num_requests: int) -> float:
        return self.step_s + self.request_s * num_requests
