"""A smaller model guesses: its likeliest token, one after the other.

It has a KV cache of its own, with as many blocks as the model's and a prefix cache over them, and computes every prompt
itself, since no other worker has its KV: `CATCH_UP_TOKENS` of all requests in a step. A request is drafted for once its
prompt is computed.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from common.block_hash import root_hash
from common.config import EngineSettings
from common.errors import StartupError
from common.model_files import open_model
from common.sampling import SamplingParams
from engine.blocks.block_manager import BlockManager
from engine.device import Device
from engine.loading.embedded_model import ensure_model
from engine.local.device import LocalDevice
from engine.local.memory import weight_bytes
from engine.request import Request, RequestStatus
from engine.sampling.draws import draw
from engine.step import StepRow

log = logging.getLogger(__name__)

CATCH_UP_TOKENS = 512
_GREEDY = SamplingParams(temperature=0.0)
_LIKELIEST = draw(_GREEDY, 0)
_ENDED = (RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH, RequestStatus.FINISHED_ABORTED)


@dataclass(slots=True)
class _Follower:
    """A request as the draft model sees it."""

    request: Request  # with its blocks here; never the engine's own
    ahead: list[int] = field(default_factory=list)  # drafted tokens whose KV is computed behind `request.token_ids`


class ModelDrafter:
    def __init__(self, device: Device, vocab_size: int, cost: float) -> None:
        """`vocab_size`: that of the model that checks. `cost`: of a step of the draft model, as a share of a step of
        that model."""
        self.cost = cost
        self._device = device
        self._vocab_size = vocab_size
        self._blocks = BlockManager(
            device.info.num_blocks, device.info.spec.block_size, root_hash(device.info.spec.fingerprint())
        )
        self._followers: dict[Request, _Follower] = {}

    def anew(self) -> ModelDrafter:
        """The same model, following no request and with an empty cache."""
        return ModelDrafter(self._device, self._vocab_size, self.cost)

    def draft(self, lengths: Mapping[Request, int]) -> dict[Request, list[int]]:
        for request in [one for one in self._followers if one.status in _ENDED]:
            self._leave(request)
        followers = {
            request: follower
            for request, length in lengths.items()
            if (follower := self._follow(request, length, lengths)) is not None
        }
        drafts = self._catch_up(followers)
        for length in range(1, max(lengths.values(), default=0)):
            going = [one for one, draft in drafts.items() if len(draft) == length < lengths[one]]
            self._go_on({request: followers[request] for request in going}, drafts)
        return drafts

    def _follow(self, request: Request, length: int, wanted: Mapping[Request, int]) -> _Follower | None:
        """The request's follower, with all of its tokens and blocks for `length` more; None if there is no room."""
        num_tokens = request.num_tokens + length
        follower = self._followers.get(request)
        new = request.token_ids[follower.request.num_tokens if follower is not None else 0 :]
        if num_tokens > self._device.info.max_model_len or max(new, default=0) >= self._device.info.vocab_size:
            self._leave(request)
            return None
        if follower is None:
            follower = self._newcomer(request)
            if not self._allocate(follower.request, num_tokens):
                for idle in [one for one in self._followers if one not in wanted]:
                    self._leave(idle)
                if not self._allocate(follower.request, num_tokens):
                    return None
            self._followers[request] = follower
            return follower
        own = follower.request
        num_right = 0
        while num_right < min(len(new), len(follower.ahead)) and new[num_right] == follower.ahead[num_right]:
            num_right += 1
        follower.ahead.clear()
        own.token_ids += new
        own.num_computed_tokens = min(own.num_computed_tokens + num_right, own.num_tokens - 1)
        if self._blocks.append(own, num_tokens):
            return follower
        self._leave(request)
        return None

    def _newcomer(self, request: Request) -> _Follower:
        own = Request(
            request_id=request.request_id,
            token_ids=list(request.token_ids),
            num_prompt_tokens=request.num_prompt_tokens,
            sampling_params=_GREEDY,
            arrival_time=request.arrival_time,
            extra_keys=request.extra_keys,
        )
        return _Follower(own)

    def _allocate(self, own: Request, num_tokens: int) -> bool:
        num_found = self._blocks.find_prefix(own)
        if not self._blocks.allocate(own, num_tokens, num_found):
            return False
        own.num_computed_tokens = num_found * self._blocks.block_size
        return True

    def _leave(self, request: Request) -> None:
        follower = self._followers.pop(request, None)
        if follower is not None:
            self._blocks.free(follower.request)

    def _catch_up(self, followers: Mapping[Request, _Follower]) -> dict[Request, list[int]]:
        """Computes tokens of the requests. Returns the first drafted token of each that lacks none then."""
        rows: list[StepRow] = []
        owners: list[tuple[Request, Request, int]] = []
        budget = CATCH_UP_TOKENS
        for request, follower in sorted(followers.items(), key=lambda item: item[1].request.num_missing_tokens):
            own = follower.request
            num_new = min(own.num_missing_tokens, budget)
            if num_new:
                budget -= num_new
                rows.append(_row(own, own.token_ids[own.num_computed_tokens :][:num_new], own.num_computed_tokens))
                owners.append((request, own, num_new))
        drafts = {}
        for (request, own, num_new), token in zip(owners, self._execute(rows), strict=True):
            own.num_computed_tokens += num_new
            self._blocks.name_computed(own)
            if not own.num_missing_tokens and token < self._vocab_size:
                drafts[request] = [token]
        return drafts

    def _go_on(self, followers: Mapping[Request, _Follower], drafts: dict[Request, list[int]]) -> None:
        """Drafts one more token for each request."""
        rows = []
        for request, follower in followers.items():
            own, draft = follower.request, drafts[request]
            rows.append(_row(own, draft[-1:], own.num_tokens + len(draft) - 1))
            follower.ahead.append(draft[-1])
        for request, token in zip(followers, self._execute(rows), strict=True):
            if token < self._vocab_size:
                drafts[request].append(token)

    def _execute(self, rows: Sequence[StepRow]) -> list[int]:
        tokens = self._device.execute(rows) if rows else []
        return [token.token_id for token in tokens if token is not None]


def _row(own: Request, token_ids: list[int], num_computed_tokens: int) -> StepRow:
    return StepRow(
        token_ids=token_ids, num_computed_tokens=num_computed_tokens, block_ids=own.block_ids, draw=_LIKELIEST
    )


def load_draft_model(settings: EngineSettings, device: Device) -> ModelDrafter:
    """The model that `settings.speculation` names, for the model of `device`. Raises `StartupError`."""
    model = open_model(ensure_model(settings.model, settings.cache_dir, log.info))
    draft = open_model(ensure_model(settings.speculation, settings.cache_dir, log.info))
    ours, theirs = (files.path / "tokenizer.json" for files in (model, draft))
    if not (ours.is_file() and theirs.is_file()) or _vocabulary(str(ours)) != _vocabulary(str(theirs)):
        raise StartupError(
            f"--speculation {settings.speculation} has another tokenizer than --model {settings.model}: it would guess "
            "other tokens"
        )
    own = {"num_blocks": device.info.num_blocks, "block_size": device.info.spec.block_size, "max_model_len": None}
    drafting = LocalDevice(draft.path, settings.model_copy(update={**own, "model": settings.speculation}), raises=True)
    drafting.warm_up()
    cost = weight_bytes(draft, 1) / weight_bytes(model, 1)
    log.info("draft model ready", extra={"model": settings.speculation, "cost": round(cost, 3)})
    return ModelDrafter(drafting, device.info.vocab_size, cost)


def _vocabulary(file: str) -> dict[str, int]:
    vocabulary: dict[str, int] = Tokenizer.from_file(file).get_vocab(with_added_tokens=True)
    return vocabulary
