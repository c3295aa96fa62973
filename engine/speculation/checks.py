"""One step's check of one request's draft: the rows that it needs, and the tokens that come of them."""

from __future__ import annotations

from collections.abc import Sequence

from common.types import SampledToken
from engine.batch import SampleInput, SequenceInput, StepOutput
from engine.guide_state import GuideError
from engine.request import Request


def check_rows(request: Request, draft: Sequence[int], eos_token_ids: frozenset[int]) -> list[SequenceInput]:
    """One row for each drafted token, as if the tokens before it were in the answer; fewer if the grammar refuses a
    token. The guide must have followed the answer so far."""
    rows: list[SequenceInput] = []
    changes, guide = request.logit_changes(eos_token_ids), request.guide
    token_ids = list(request.token_ids) if changes is not None or guide is not None else []
    for place, token_id in enumerate(draft):
        if changes is not None or guide is not None:
            token_ids.append(token_id)
        if changes is not None:
            changes = changes.fork()
            changes.follow(token_ids, request.num_prompt_tokens)
        if guide is not None:
            guide = guide.fork()
            try:
                guide.follow(token_ids, request.num_prompt_tokens)
            except GuideError:
                break
        sample = SampleInput(
            params=request.sampling_params,
            num_output_tokens=request.num_output_tokens + place + 1,
            changes=changes,
            guide=guide,
        )
        rows.append(
            SequenceInput(
                token_ids=[token_id],
                num_computed_tokens=request.num_tokens + place,
                block_ids=request.block_ids,
                sample=sample,
            )
        )
    return rows


def accepted_tokens(
    first: SampledToken, rows: Sequence[SequenceInput], drawn: Sequence[StepOutput]
) -> list[SampledToken]:
    """`first`, drawn after the answer so far, and what was drawn after each drafted token that was right. `drawn` has
    one entry for each of `rows`, None if the row allows no token: the answer then stops before that row, and the next
    step comes to the row again."""
    tokens = [first]
    for row, token in zip(rows, drawn, strict=True):
        if row.token_ids != [tokens[-1].token_id] or not isinstance(token, SampledToken):
            break
        tokens.append(token)
    return tokens
