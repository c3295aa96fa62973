"""Which requests a step may take that is begun before the one before it has ended. Pure.

The token that the step before draws for a request is not known yet. A device is told where it will find the token
(`engine.step.Drawn`).
"""

from __future__ import annotations

from engine.messages import RequestMode
from engine.request import Request


def may_go_ahead(request: Request) -> bool:
    """Whether the step that draws the request's token after next can be made before its next token is known. A grammar,
    penalties and other edits of logits depend on that token. Logprobs of a prompt are counted when a step ends."""
    return request.guide is None and not request.changes_logits and not request.num_unscored_tokens


def ends_next(request: Request, max_model_len: int) -> bool:
    """Whether the request computes no more, whatever token it gets next."""
    return (
        request.embed is not None
        or request.mode is RequestMode.PREFILL
        or request.num_output_tokens + 1 >= request.sampling_params.max_tokens
        or request.num_tokens + 1 >= max_model_len
    )
