"""Tells the front what is known of the steps' times: at once, then on change."""

from __future__ import annotations

from common.batch_time_file import encode
from engine import messages as m
from engine.learning.learner import Learner, Standing

INTERVAL_S = 1.0


class BatchTimeReporter:
    def __init__(self, learner: Learner) -> None:
        self._learner = learner
        self._told: Standing | None = None
        self._next = 0.0

    def due(self, now: float) -> list[m.BatchTimeChanged]:
        """What has to be told now."""
        standing, before = self._learner.standing, self._told
        if now < self._next or standing == before:
            return []
        self._next, self._told = now + INTERVAL_S, standing
        model = self._learner.model
        is_new = model is not None and (before is None or before.version != standing.version)
        return [
            m.BatchTimeChanged(
                model=encode(model) if model is not None and is_new else b"",
                source=standing.source,
                version=standing.version,
                made_at=standing.made_at,
                num_steps=standing.num_steps,
                error_median=standing.error_median,
                error_p90=standing.error_p90,
                drifts=standing.drifts,
            )
        ]
