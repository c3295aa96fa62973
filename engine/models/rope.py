"""Rotary embedding as config.json describes it: `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from common.errors import StartupError
from engine.layers import RopeScaling
from engine.models.base import ConfigReader

DEFAULT_THETA = 10_000.0


@dataclass(slots=True, frozen=True)
class LinearScaling(RopeScaling):
    """Positions divided by a factor (arXiv 2306.15595)."""

    factor: float

    def scale(self, inv_freq: torch.Tensor) -> torch.Tensor:
        return inv_freq / self.factor


@dataclass(slots=True, frozen=True, kw_only=True)
class Llama3Scaling(RopeScaling):
    """Llama 3.1's: long wavelengths are stretched by `factor`, short ones kept, those between interpolated."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_positions: int

    def scale(self, inv_freq: torch.Tensor) -> torch.Tensor:
        longest_kept = self.original_positions / self.high_freq_factor  # wavelengths, in positions
        shortest_stretched = self.original_positions / self.low_freq_factor
        wavelength = 2 * math.pi / inv_freq
        share = (self.original_positions / wavelength - self.low_freq_factor) / (
            self.high_freq_factor - self.low_freq_factor
        )
        between = (1 - share) * inv_freq / self.factor + share * inv_freq
        scaled = torch.where(wavelength > shortest_stretched, inv_freq / self.factor, between)
        return torch.where(wavelength < longest_kept, inv_freq, scaled)


def read_rope(config: ConfigReader, max_positions: int) -> tuple[float, RopeScaling | None]:
    """Base wavelength ("theta") and scaling. Raises `StartupError` for a type of scaling that is not known."""
    parameters = config.section("rope_parameters")
    if parameters is not None:
        theta = parameters.number("rope_theta", config.number("rope_theta", DEFAULT_THETA))
    else:
        theta = config.number("rope_theta", DEFAULT_THETA)
        parameters = config.section("rope_scaling")
    if parameters is None:
        return theta, None
    if parameters.number("partial_rotary_factor", 1.0) != 1.0:
        raise StartupError("config.json: partial_rotary_factor other than 1 is not supported by this architecture")
    kind = parameters.text("rope_type", parameters.text("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, LinearScaling(parameters.number("factor"))
    if kind == "llama3":
        return theta, Llama3Scaling(
            factor=parameters.number("factor"),
            low_freq_factor=parameters.number("low_freq_factor"),
            high_freq_factor=parameters.number("high_freq_factor"),
            original_positions=parameters.integer("original_max_position_embeddings", max_positions),
        )
    raise StartupError(f"config.json: rope type {kind!r} is not supported; known are default, linear, llama3")
