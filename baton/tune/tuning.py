"""From a traffic and targets to the settings for it, and what each of them is worth.

load        so much more of the traffic that the defaults miss targets: who serves all alike cannot be told apart
search      (`baton.tune.search`) on one half of the requests
check       the best of it on the other half: a knob goes back to its default if that costs nothing there
confirm     real runs, if asked for
explain     the chosen settings again, with one knob at its default at a time
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from baton.tune.knobs import Config, Space, Value
from baton.tune.search import Found, OutOfTimeError, search
from baton.tune.trials import Trial, Trials
from common.config import TuneSettings
from common.errors import ConfigError

NUM_FINALISTS = 3
MAX_CHECKED = 10  # settings that may become finalists
ENOUGH = 0.95  # share of good answers from which on a load is held, and too small to compare settings by
GROWTH = 1.5  # of the load
MAX_ROUNDS = 6  # of searching, each with a higher load
TOLERANCE = 0.05  # of the rate that is held, as a share of it
MAX_HALVINGS = 30
SEARCH_SHARE = 0.7  # of the minutes; the rest is for the checks
HARM = 0.01  # share of good answers that settings may lose at the traffic's own rate
CLEARLY = 0.02  # by so much more good answers a real run changes the order


@dataclass(slots=True, frozen=True)
class Confirmed:
    """A real run of one finalist."""

    good_share: float | None  # None: it did not come to its end
    expected: float  # of the same requests, by simulation
    how: str  # on what it ran
    figures: Mapping[str, float] = field(default_factory=dict)  # some of those of `baton bench serve`
    problem: str = ""  # why it failed, or its figures say little; empty if nothing is known


@dataclass(slots=True, frozen=True)
class Finalist:
    config: Config
    check: Trial  # at the load of the search, on requests that the search did not see
    own_rate: Trial  # likewise, at the traffic's own rate
    confirmed: Confirmed | None = None


@dataclass(slots=True, frozen=True)
class KnobFound:
    name: str
    chosen: Value
    default: Value
    is_searched: bool
    with_default: Trial | None  # the chosen settings but for this knob; None if it is at its default, or time was over


@dataclass(slots=True, frozen=True)
class Tuned:
    trials: Trials
    load: float
    default: Finalist
    finalists: tuple[Finalist, ...]  # the best first, by simulation
    chosen: Finalist
    knobs: tuple[KnobFound, ...]
    held_load: float | None  # the highest at which `ENOUGH` answers are good with the chosen settings; None: not known
    held_by_default: float | None
    is_complete: bool  # there was time for all

    @property
    def space(self) -> Space:
        return self.trials.space

    def goodput(self, trial: Trial) -> float:
        """Good answers for each second of the traffic."""
        return trial.score.good_share * self.trials.rate(is_check=trial.is_check, load=trial.load)


Progress = Callable[[str, float], None]
"""Told what is done, and the share of the time that has passed."""


def tune(
    settings: TuneSettings,
    *,
    confirm: Callable[[Trials, Config, float], Confirmed] | None = None,
    progress: Progress = lambda _what, _share: None,
    clock: Callable[[], float] = time.monotonic,
    play: Callable[[TuneSettings, Callable[[], bool]], Trials] = Trials,
) -> Tuned:
    """`confirm` gets settings and the load, and is asked for each finalist. Raises `ConfigError`, also if no settings
    keep the targets of any request."""
    return _Tuning(settings, progress, clock, play).run(confirm)


class _Tuning:
    def __init__(
        self,
        settings: TuneSettings,
        progress: Progress,
        clock: Callable[[], float],
        play: Callable[[TuneSettings, Callable[[], bool]], Trials],
    ) -> None:
        self._seconds = 60 * settings.minutes
        self._clock, self._progress = clock, progress
        self._start = clock()
        self._share = 1.0  # of the time, that what runs now may use
        self._what = "defaults"
        self._trials = play(settings, self._is_late)
        self._load = settings.load
        self._seed = settings.seed
        self._is_complete = True

    def _is_late(self) -> bool:
        passed = (self._clock() - self._start) / self._seconds
        self._progress(self._what, min(passed, 1.0))
        return passed >= self._share

    def run(self, confirm: Callable[[Trials, Config, float], Confirmed] | None) -> Tuned:
        trials, space = self._trials, self._trials.space
        try:
            load = self._grown(space.default, 1.0) if self._load is None else self._load
            default = self._default_at(load)
        except OutOfTimeError:
            raise ConfigError(
                "minutes", f"{self._seconds / 60:g} are too few for the defaults alone; take fewer --requests"
            ) from None
        load, default, found = self._searched(load, default)
        finalists = self._finalists(found, load, default)
        if not any(one.check.score.good_share for one in finalists):
            raise ConfigError("goodput", _hopeless(trials, default.check))
        if confirm is not None:
            begin = self._clock()
            for number, one in enumerate(finalists):
                self._progress(f"real run {number + 1} of {len(finalists)}", 1.0)
                finalists[number] = replace(one, confirmed=confirm(trials, one.config, load))
            self._start += self._clock() - begin  # they have no part in the minutes
        chosen = choose(finalists, default)
        knobs = tuple(self._explained(chosen, load))
        held, held_by_default = self._held(chosen.config, load), self._held(space.default, load)
        self._progress("done", 1.0)
        return Tuned(trials, load, default, tuple(finalists), chosen, knobs, held, held_by_default, self._is_complete)

    def _grown(self, config: Config, load: float) -> float:
        """From `load` on, the first that `config` does not hold, or the highest that tells something. Raises
        `OutOfTimeError`."""
        while load < self._trials.max_load and self._trials.play(config, load=load).score.good_share >= ENOUGH:
            load = min(GROWTH * load, self._trials.max_load)
        return load

    def _default_at(self, load: float) -> Finalist:
        """And what the search begins with. Raises `OutOfTimeError`."""
        self._trials.play(self._trials.space.default, load=load)
        return self._finalist(self._trials.space.default, load)

    def _searched(self, load: float, default: Finalist) -> tuple[float, Finalist, Found]:
        """The load at which settings were compared in the end, the defaults there, and what was found."""
        self._share, self._what = SEARCH_SHARE, "search"
        found = self._search(load)
        for _ in range(MAX_ROUNDS - 1):
            best = found.ranked(self._trials.space)
            if self._load is not None or not found.is_complete:
                break
            try:
                higher = self._grown(best[0], load)
                if higher == load:
                    break
                default = self._default_at(higher)
            except OutOfTimeError:
                self._is_complete = False
                break
            load, found = higher, self._search(higher, best[:MAX_CHECKED])
        self._is_complete &= found.is_complete
        return load, default, found

    def _search(self, load: float, start: Sequence[Config] = ()) -> Found:
        trials = self._trials
        return search(
            trials.space,
            lambda config, size: trials.play(config, load=load, num_requests=size).score,
            len(trials.requests()),
            self._seed,
            start,
        )

    def _finalists(self, found: Found, load: float, default: Finalist) -> list[Finalist]:
        """The best first, by requests that the search has not seen. At least the defaults."""
        self._share, self._what = 1.0, "check"
        space = self._trials.space
        finalists: dict[Config, Finalist] = {}
        seen: set[object] = set()
        try:
            for config in found.ranked(space):
                score = found.scores[config]
                if score in seen:  # they differ in what does nothing
                    continue
                seen.add(score)
                pruned = self._pruned(config, load)
                if pruned not in finalists:
                    finalists[pruned] = self._finalist(pruned, load)
                if len(finalists) == NUM_FINALISTS or len(seen) == MAX_CHECKED:
                    break
        except OutOfTimeError:
            self._is_complete = False
        listed = [*finalists.values()] or [default]
        return sorted(listed, key=lambda one: (*one.check.score.order, space.num_changed(one.config)))

    def _pruned(self, config: Config, load: float) -> Config:
        """With every knob at its default that is no better elsewhere."""
        space = self._trials.space
        best = self._trials.play(config, load=load, is_check=True).score.order
        before = None
        while before != config:  # a knob may be of no use any more once another one is back
            before = config
            for index, knob in enumerate(space.knobs):
                plainer = space.at(config, index, knob.default)
                if plainer == config:
                    continue
                order = self._trials.play(plainer, load=load, is_check=True).score.order
                if order <= best and space.num_changed(plainer) < space.num_changed(config):
                    config, best = plainer, order
        return config

    def _finalist(self, config: Config, load: float) -> Finalist:
        play = self._trials.play
        return Finalist(config, play(config, load=load, is_check=True), play(config, load=1.0, is_check=True))

    def _explained(self, chosen: Finalist, load: float) -> Sequence[KnobFound]:
        space = self._trials.space
        found: list[KnobFound] = []
        for index, knob in enumerate(space.knobs):
            value, trial = chosen.config[index], None
            if value != knob.default:
                try:
                    trial = self._trials.play(space.at(chosen.config, index, knob.default), load=load, is_check=True)
                except OutOfTimeError:
                    self._is_complete = False
            found.append(KnobFound(knob.name, value, knob.default, len(knob.values) > 1, trial))
        return found

    def _held(self, config: Config, at: float) -> float | None:
        """The highest load that is held, as exactly as `TOLERANCE` says: at most `Trials.max_load`; 0 if none is. None
        if the requests are too few, or the time was."""
        low, high = 0.0, self._trials.max_load  # that is held, and that is not
        if high < at:
            return None
        load = high
        try:
            for _ in range(MAX_HALVINGS):
                if self._trials.play(config, load=load, is_check=True).score.good_share >= ENOUGH:
                    low = load
                else:
                    high = load
                if high - low <= TOLERANCE * low:
                    break
                load = (low + high) / 2 if low else high / 2
        except OutOfTimeError:
            self._is_complete = False
            return None
        return low


def choose(finalists: Sequence[Finalist], default: Finalist) -> Finalist:
    """The best by simulation that does no harm at the traffic's own rate, or one that was clearly better in a real run;
    `default` if there is none. `finalists`: the best first."""
    least = default.own_rate.score.good_share - HARM
    harmless = [one for one in finalists if one.own_rate.score.good_share >= least]
    if not harmless:
        return default
    best = harmless[0]
    for other in harmless[1:]:
        ours, others = _confirmed_share(best), _confirmed_share(other)
        if ours is not None and others is not None and others > ours + CLEARLY:
            best = other
    return best if best.check.score.order <= default.check.score.order else default


def _confirmed_share(one: Finalist) -> float | None:
    """Good answers of a real run that says something."""
    return None if one.confirmed is None or one.confirmed.problem else one.confirmed.good_share


def _hopeless(trials: Trials, default: Trial) -> str:
    reasons = "; ".join(f"{num} of {default.num_requests}: {why}" for why, num in [*default.failures.items()][:3])
    found = ", ".join(
        f"{name.upper()} {default.figures[f'p50_{name}_ms']:.4g} ms"
        for name in trials.goodput
        if f"p50_{name}_ms" in default.figures
    )
    told = reasons or f"medians {found}"
    return f"no settings that were tried keep these targets for any request; with the defaults: {told}"
