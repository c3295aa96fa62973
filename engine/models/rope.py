"""Rotary frequencies as transformers computes them from config.json: plain, linear, dynamic, yarn, longrope, llama3."""

from __future__ import annotations

import logging

import torch

from common.errors import StartupError
from engine.models.base import ConfigReader
from engine.models.description import Rope
from engine.models.hf_config import HFConfig

log = logging.getLogger(__name__)

KINDS = ("default", "linear", "dynamic", "yarn", "longrope", "llama3")


def read_rope(
    config: HFConfig, head_dim: int, num_positions: int, *, layer_type: str | None = None, may_be_partial: bool = False
) -> Rope:
    """`layer_type` names the section of rope_parameters if each type of layer has its own. Frequencies are those for
    sequences up to `num_positions`; they never change while a model runs, so that equal tokens have equal KV.

    That matters to longrope alone, whose frequencies transformers chooses anew for each call, by its length. The other
    kinds are the same for all lengths that the model was made for.
    """
    parameters = config.values.section("rope_parameters") or ConfigReader({})
    if layer_type is not None:
        parameters = parameters.section(layer_type) or ConfigReader({})
    kind = parameters.text("rope_type", "default")
    share = parameters.number("partial_rotary_factor", 1.0)
    if share != 1.0 and not may_be_partial:
        raise StartupError("config.json: partial_rotary_factor other than 1 is not supported by this architecture")
    if kind == "default":
        rotary_dim = int(head_dim * share)
        exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float) / rotary_dim
        return Rope(inv_freq=1.0 / (parameters.number("rope_theta") ** exponents), scale=1.0)
    if kind not in KINDS:
        raise StartupError(f"config.json: rope type {kind!r} is not supported; known are {', '.join(KINDS)}")

    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config.raw.head_dim = head_dim  # some classes leave it None
    variant, length = "", None
    if kind == "longrope":
        length = num_positions
        is_long = num_positions > parameters.integer("original_max_position_embeddings")
        variant = f"longrope {'long' if is_long else 'short'}"
        log.info("rotary frequencies", extra={"rope": variant, "max_model_len": num_positions})
    try:
        inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](config.raw, None, seq_len=length, layer_type=layer_type)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise StartupError(f"config.json: rope_parameters of type {kind} do not fit: {error!r}") from error
    return Rope(inv_freq=inv_freq.float(), scale=float(scale), variant=variant)
