"""Question and answer of a routing policy, and the ranking of the workers of one role. Pure; the registry supplies the
facts.

    fleet ── filter ──> candidates ── rank ──> ranked ── pick ──> decode worker, prefill workers in order
             ready, compatible,      a Ranking
             not tried before        for each role

A policy is a `Ranking`: a file of this package and a line in `registry`. It keeps what state it needs to itself. A
fleet may have a thousand workers, so a ranking asks its candidates for the few that it needs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import msgspec

from router.fleet.endpoint import Endpoint
from router.fleet.fleet import Fleet

NUM_RANKED = 4  # candidates that anyone asks for: three prefill workers to be asked in turn, four named as reasons


@dataclass(slots=True, frozen=True)
class FirstTokenTarget:
    """How soon a request's first token is wanted, and how far predictions of such tokens were off lately."""

    left_s: float  # until it is due; negative: it was due already
    token_s: float | None = None  # most seconds for each further token; None: they may come at any time
    low: float = 1.0  # times the prediction: hardly any first token came sooner
    high: float = 1.0  # nine in ten first tokens came within so many times the prediction


class Late(msgspec.Struct, frozen=True):
    """No workers can give a first token in time, as they predict it. Seconds from now."""

    soonest_s: float  # by the workers that would be the first
    alone_s: float  # by workers that have nothing else to compute
    num_workers: int  # that can compute its prompt


class RoutingRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy knows about a request."""

    num_prompt_tokens: int
    num_tokens: int = 0  # of prompt and answer together, at most
    fingerprint: str  # of the model and KV layout that the request was tokenized for
    tried: frozenset[tuple[str, str]] = frozenset()  # workers given up on: `Endpoint.incarnation`
    refused: frozenset[tuple[str, str]] = frozenset()  # of `tried`, those that are there and said no
    block_names: Sequence[bytes] = ()  # of the prompt, for `Routes` to look up
    cached_blocks: Mapping[str, int] = {}  # by address: leading blocks that the worker has
    # By address: those of them that the worker has said it has. Others are about to be there.
    num_told_blocks: Callable[[str], int] | None = None  # None: all
    session: str = ""  # requests of one session belong together; empty: it belongs to none
    parameters: frozenset[str] = frozenset()  # of sampling, that not all versions of workers know
    beside: tuple[str, str] | None = None  # incarnation of the decode worker with other answers to the prompt
    in_place: bool = False  # the decode worker has to compute all of the prompt itself, whatever is cached
    first_token: FirstTokenTarget | None = None  # None: it may come at any time
    handoff_token_s: float | None = None  # `router.policy.costs.Costs.handoff`


@dataclass(slots=True)
class Reasons:
    """Why a request goes where it goes. Made to lines only if somebody reads them."""

    passed_over: Sequence[tuple[str, str]] = ()  # address of a worker, and why not that one
    choices: Sequence[Callable[[], str]] = ()

    def lines(self) -> tuple[str, ...]:
        """One for each worker passed over, and for each choice."""
        return (*(f"{address}: {why}" for address, why in self.passed_over), *(choice() for choice in self.choices))


class RoutingDecision(msgspec.Struct, frozen=True, kw_only=True):
    decode: Endpoint
    prefill: tuple[Endpoint, ...]  # in order of preference; empty: the decode worker prefills in place
    reasons: Reasons
    in_place: bool = False  # the decode worker is to compute what is missing, although it may ask `prefill` for it
    min_remote_tokens: int = 0  # the decode worker asks for no fewer missing tokens, see `common.prefill_place`
    num_cached_tokens: int = 0  # that the decode worker is thought to have
    num_missing_tokens: int = 0  # that the worker which computes the prompt, or its first part, is thought to lack
    split_at: int = 0  # prompt tokens from this one on are computed by the decode worker after all; 0: it is not split
    num_tail_tokens: int = 0  # those
    prefill_cost: float = 0.0  # tokens that the first of `prefill` computes until it is done with the prompt
    prefill_s: float | None = None  # the same in seconds, if the workers said how long their steps take
    step_s: float | None = None  # likewise, of the decode worker's next step: the time between two tokens
    may_hedge: bool = False  # the second of `prefill` may be asked beside the first, if that is late
    first_token_s: float | None = None  # predicted, from now, if the request has such a target and `prefill_s` is known
    slack_s: float | None = (
        None  # likewise: within so many seconds its prompt has to begin, to be in time if it is alone
    )
    late: Late | None = None  # the target cannot be met, here or elsewhere


class Policy(Protocol):
    def pick(self, request: RoutingRequest, workers: Fleet | Sequence[Endpoint]) -> RoutingDecision:
        """Raises `UnavailableError`, with each worker's reason, if no decode worker can take the request. With a list
        of workers, each of them is looked at."""
        ...


class Candidate(msgspec.Struct, frozen=True):
    """A worker that could take a request in one role, and what that would cost (`router.policy.costs`): in seconds, or
    in tokens of prompt computed."""

    endpoint: Endpoint
    num_cached_tokens: int  # leading tokens of the prompt whose KV it is thought to have
    num_missing_tokens: int
    wait: float  # until the worker comes to this request
    work: float  # for what the worker lacks: to compute it, or to fetch it
    in_seconds: bool = False

    def in_words(self, cost: float) -> str:
        return cost_in_words(cost, in_seconds=self.in_seconds)

    @property
    def address(self) -> str:
        return self.endpoint.address


def cost_in_words(cost: float, *, in_seconds: bool) -> str:
    return f"{1000 * cost:.0f} ms" if in_seconds else f"{cost:.0f}"


class Candidates(Sequence[Candidate]):
    """The candidates of one role, in configured order. The list is rotated by one at each request, which spreads ties
    over the workers. To go through all of them takes long in a large fleet; the methods below do not."""

    @abstractmethod
    def soonest(self, num: int) -> Sequence[Candidate]:
        """The first `num` by least `wait + work`; of equal ones, the less loaded, then in this order."""

    @abstractmethod
    def least_loaded(self, num: int) -> Sequence[Candidate]:
        """The first `num` by `router.policy.least_load.candidate_order`, then in this order."""

    @abstractmethod
    def soonest_computed(self, num: int) -> Iterator[tuple[float, Callable[[], Candidate]]]:
        """About when the first `num` would have a first token, and who that is. When is `router.policy.costs.
        first_token_s` of a prompt of one token, and `work`. Only if costs are in seconds."""

    @abstractmethod
    def of(self, address: str) -> Candidate | None:
        """The candidate at this address; None if it is not one of them."""

    @property
    @abstractmethod
    def mean_load(self) -> float:
        """The mean of `router.policy.least_load.load_score`."""

    @property
    @abstractmethod
    def addresses(self) -> Sequence[str]:
        """Of all workers of this role, candidates or not: the same object as long as none comes or goes."""


@dataclass(slots=True)
class Ranked:
    candidates: Sequence[Candidate]  # the best first; `NUM_RANKED`, or all of them
    words: Callable[[Candidate], str]  # the reason for a candidate's place, in a few words


class Ranking(ABC):
    """Orders the workers of one role. A router has one for each role."""

    name: ClassVar[str]  # as `--policy` has it
    about: ClassVar[str]  # who comes first, in a few words, for the help of `--policy`

    def __init__(self, seed: int = 0) -> None:
        """`seed` is what lots are drawn by: another one for each router."""
        self._seed = seed

    @abstractmethod
    def rank(self, request: RoutingRequest, candidates: Candidates) -> Ranked:
        """The best `NUM_RANKED` at least, if there are so many."""
