"""A model of time that tests can compute in their heads."""

from __future__ import annotations

from common.batch_time import FEATURES, BatchTime, BatchTimeKey, Regime, RegimeTime, Table

KEY = BatchTimeKey(spec="0" * 32, quantization="none", device="cpu", processor="a CPU", kernels="torch", num_threads=1)


def linear_time(step_s: float, token_s: float) -> BatchTime:
    """A step takes `step_s`, and `token_s` for each new token."""
    regime = RegimeTime(
        layers=Table(knots=(0.0, 1.0), seconds=(step_s, step_s + token_s), last_slope=token_s),
        head=Table(),
        coefficients=(0.0,) * len(FEATURES),
    )
    return BatchTime(key=KEY, regimes=dict.fromkeys(Regime, regime))
