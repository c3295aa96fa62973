"""One step's check of one request's draft: the places that it needs a token at, and the tokens that come of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.types import SampledToken
from engine.request import Request
from engine.sampling.guide import Guide, GuideError
from engine.sampling.logit_changes import LogitChanges


@dataclass(slots=True, frozen=True)
class DraftedToken:
    """A token that may come, and what the token after it is drawn by, as if it were in the answer."""

    token_id: int
    place: int  # in the draft
    changes: LogitChanges | None
    guide: Guide | None


def checked_tokens(request: Request, draft: Sequence[int], eos_token_ids: frozenset[int]) -> list[DraftedToken]:
    """One entry for each drafted token; fewer if the grammar refuses a token. The guide must have followed the answer
    so far."""
    result: list[DraftedToken] = []
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
        result.append(DraftedToken(token_id, place, changes, guide))
    return result


def accepted_tokens(
    first: SampledToken, checked: Sequence[DraftedToken], drawn: Sequence[SampledToken | None]
) -> list[SampledToken]:
    """`first`, drawn after the answer so far, and what was drawn after each drafted token that was right. `drawn` has
    one entry for each of `checked`, None if no token is allowed there: the answer then stops before it, and the next
    step comes to it again."""
    tokens = [first]
    for one, token in zip(checked, drawn, strict=True):
        if one.token_id != tokens[-1].token_id or token is None:
            break
        tokens.append(token)
    return tokens
