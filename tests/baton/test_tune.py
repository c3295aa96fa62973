"""What `baton tune` searches, finds, checks, tells and writes. Real runs are those of `test_tune_confirm.py`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import jsonschema  # type: ignore[import-untyped]
import pytest
import yaml

from baton.cli.main import main
from baton.cli.tune import as_object
from baton.settings import UP_SETTINGS, WORKER_SETTINGS, RouterCommandSettings, load
from baton.tune.confirm import load_command, reason_to_simulate, served, stack_flags
from baton.tune.files import settings_files
from baton.tune.knobs import ROLES, Config, Roles, Space, fleets, make_space
from baton.tune.report import headline, held_rates, hints
from baton.tune.search import KEPT, POOL, OutOfTimeError, Score, pool, search
from baton.tune.trials import Trial, Trials
from baton.tune.tuning import Confirmed, Finalist, Tuned, choose, tune
from common.batch_time_file import encode
from common.config import TuneSettings
from common.cpu import read_cpu
from common.errors import ConfigError
from common.traffic.requests import TrafficRequest
from common.traffic.traces import write_trace
from engine.simulated.data_sheet import simulated_time
from simulation.outcome import Outcome, RequestOutcome
from tests.helm.chart import CHART

FIXED = {"policy": "least_load", "max_num_batched_tokens": 2048, "chunk_size": 512, "max_num_seqs": 64}
SMALL = {
    **FIXED,
    "min_remote_tokens": 512,
    "workers": 2,
    "requests": 12,
    "rate": 100.0,
    "prompt_tokens": 600,
    "output_tokens": 6,
    "length_sigma": 0.6,
    "block_size": 512,
    "goodput": ("ttft:150", "tpot:10"),
}
"""Roles and the queue are searched: four fleets."""
ONE = {name: value for name, value in SMALL.items() if name != "workers"} | {"both": 1, "queue_policy": "fcfs"}
"""Nothing is searched."""
HOPELESS = "goodput: no settings that were tried keep these targets for any request; with the defaults:"


def settings(**values: object) -> TuneSettings:
    return TuneSettings.model_validate({"goodput": "ttft:500", **values})


def space_of(*, longest: int = 1000, sessions: bool = False, targets: bool = True, **values: object) -> Space:
    return make_space(settings(**values), longest_prompt=longest, has_sessions=sessions, has_targets=targets)


def values_of(space: Space, name: str) -> tuple[object, ...]:
    return next(knob.values for knob in space.knobs if knob.name == name)


# ------------------------------------------------------------------------------------------------------------- knobs


def test_fleets_have_every_ratio_and_of_many_ratios_some() -> None:
    assert [*map(str, fleets(4))] == ["4B", "1P + 3D", "2P + 2D", "3P + 1D"]
    assert [*map(str, fleets(1))] == ["1B"]
    listed = [*fleets(100)]
    assert len(listed) == len(set(listed)) == 13
    assert (str(listed[1]), str(listed[-1])) == ("1P + 99D", "99P + 1D")


def test_of_a_large_fleet_the_ratios_near_the_last_one_are_tried_too() -> None:
    space = space_of(workers=100)
    config = space.at(space.default, 0, Roles(40, 60))
    near = {one[0] for one in space.moves(config, 0)}
    assert {Roles(39, 61), Roles(41, 59), Roles(36, 64), Roles(8, 92), Roles(0, 0, 100)} <= near
    assert config[0] not in near


def test_what_is_given_stays_as_it_is() -> None:
    space = space_of(prefill=1, decode=3, chunk_size=300, policy="prefix_aware")
    assert values_of(space, ROLES) == (Roles(1, 3),)
    assert values_of(space, "chunk_size") == (300,)
    assert values_of(space, "policy") == ("prefix_aware",)
    assert values_of(space, "max_num_seqs") == (64, 8, 16, 32, 128, 256)  # the default first
    assert len(values_of(space_of(prefill_policy="session", decode_policy="session"), "policy")) == 1


def test_only_what_the_traffic_can_tell_apart_is_searched() -> None:
    assert "session" not in values_of(space_of(), "policy")
    assert "session" in values_of(space_of(sessions=True), "policy")
    assert values_of(space_of(), "queue_policy") == ("auto", "fcfs")
    assert values_of(space_of(targets=False), "queue_policy") == ("auto",)
    assert values_of(space_of(longest=300), "min_remote_tokens") == (None, 64, 128, 256)


def test_a_knob_that_does_nothing_is_at_its_default() -> None:
    space = space_of(workers=2)
    names = [knob.name for knob in space.knobs]
    chunk, budget, remote = map(names.index, ("chunk_size", "max_num_batched_tokens", "min_remote_tokens"))
    large = space.at(space.default, chunk, 8192)
    assert large[chunk] == space.default[budget] == 2048  # a step has no room for more
    assert space.at(large, budget, 512)[chunk] == 512
    asking = space.at(space.default, remote, 256)
    assert asking[remote] == 256
    assert space.at(asking, 0, Roles(0, 0, 2))[remote] is None  # who computes all in place asks nobody
    assert all(one == space.at(one, 0, one[0]) for one in pool(space, 1))


# ------------------------------------------------------------------------------------------------------------ search


class Landscape:
    """Good answers grow with each knob that is as in `best`."""

    def __init__(self, space: Space, best: Config, most_calls: int | None = None) -> None:
        self.space, self.best, self.most_calls = space, best, most_calls
        self.calls: list[tuple[Config, int]] = []

    def __call__(self, config: Config, num_requests: int) -> Score:
        if len(self.calls) == self.most_calls:
            raise OutOfTimeError
        self.calls.append((config, num_requests))
        num_right = sum(map(lambda one, best: one == best, config, self.best))
        return Score(num_right / len(self.best), 1.0)


def test_the_search_finds_the_best_of_a_space_in_few_simulations() -> None:
    space = space_of(workers=8)
    best = space.at(space.default, 0, Roles(5, 3))
    for index, value in ((1, "prefix_aware"), (2, "fcfs"), (3, 8192), (4, 4096), (5, 256), (6, 256)):
        best = space.at(best, index, value)
    assert space.num_changed(best) == len(space.knobs)
    measure = Landscape(space, best)
    found = search(space, measure, 360, seed=1)
    assert found.is_complete
    assert found.ranked(space)[0] == best
    assert measure.calls[0] == (space.default, 360)
    rounds = [[size for _, size in measure.calls[1:]].count(size) for size in (40, 120)]
    assert rounds == [POOL, POOL // KEPT]
    assert len(measure.calls) == len(set(measure.calls)) < 150  # of some 100,000 settings


def test_equal_seeds_search_alike() -> None:
    space = space_of(workers=4)
    runs = [Landscape(space, space.default) for _ in range(3)]
    for measure, seed in zip(runs, (7, 7, 8), strict=True):
        search(space, measure, 360, seed)
    assert runs[0].calls == runs[1].calls != runs[2].calls


def test_what_makes_no_difference_stays_at_its_default() -> None:
    space = space_of(workers=4)
    found = search(space, lambda _config, _size: Score(0.5, 0.70001), 100, seed=1)
    assert found.ranked(space)[0] == space.default
    closer = Score(0.5, 0.702)  # by less than a hundredth of the targets
    found = search(space, lambda one, _size: closer if one == space.default else Score(0.5, 0.6999), 100, seed=1)
    assert found.ranked(space)[0] == space.default


@pytest.mark.parametrize("most_calls", [1, 20, 40])
def test_what_was_found_in_time_is_told(most_calls: int) -> None:
    space = space_of(workers=4)
    found = search(space, Landscape(space, space.default, most_calls), 360, seed=1)
    assert not found.is_complete
    assert found.ranked(space)[0] == space.default


# ------------------------------------------------------------------------------------------------------------ choice


def finalist(name: str, good: float, own: float = 1.0, real: float | None = None, problem: str = "") -> Finalist:
    def trial(share: float) -> Trial:
        return Trial((name,), True, 1.0, 100, Score(share, 1.0), {}, {})

    confirmed = Confirmed(real, good, "here", problem=problem) if real is not None else None
    return Finalist((name,), trial(good), trial(own), confirmed)


@pytest.mark.parametrize(
    ("finalists", "chosen"),
    [
        ([finalist("a", 0.9), finalist("b", 0.8)], "a"),
        ([finalist("a", 0.9, own=0.9), finalist("b", 0.8)], "b"),  # a serves the usual traffic worse
        ([finalist("a", 0.9, own=0.9), finalist("b", 0.8, own=0.9)], "default"),
        ([finalist("a", 0.4)], "default"),
        ([finalist("a", 0.9, real=0.7), finalist("b", 0.8, real=0.75)], "b"),
        ([finalist("a", 0.9, real=0.7), finalist("b", 0.8, real=0.71)], "a"),  # no more than noise
        ([finalist("a", 0.9, real=0.7), finalist("b", 0.8, real=0.9, problem="the client was late")], "a"),
        ([finalist("a", 0.9, real=0.1), finalist("b", 0.8)], "a"),
    ],
)
def test_the_chosen_one_does_no_harm_and_real_runs_may_change_it(finalists: list[Finalist], chosen: str) -> None:
    assert choose(finalists, finalist("default", 0.5)).config == (chosen,)


# ------------------------------------------------------------------------------------------------------------ traffic


def test_what_was_found_is_checked_by_what_follows_in_a_trace_or_by_another_seed(tmp_path: Path) -> None:
    made = [TrafficRequest(at=float(at), runs=((at, 100),), num_output_tokens=5) for at in range(5)]
    write_trace(tmp_path / "trace", made)
    trials = Trials(settings(trace=str(tmp_path / "trace"), requests=4))
    others = trials.requests(is_check=True)
    assert trials.requests() == made[:4]
    assert (others[0].at, others[0].runs) == (0.0, made[4].runs)
    assert [one.at for one in others[1:]] == pytest.approx([1.0, 2.0, 3.0])  # the trace again
    assert not {one.runs for one in others} & {one.runs for one in made[:4]}  # with prompts of its own
    assert [one.at for one in trials.requests(load=2.0)] == [0.0, 0.5, 1.0, 1.5]
    assert trials.rate(load=2.0) == 2.0
    seeds = Trials(settings(requests=4, seed=3)), Trials(settings(requests=4, seed=4))
    assert seeds[0].requests(is_check=True) == seeds[1].requests()


# ----------------------------------------------------------------------------------------------------------- command


@pytest.fixture(scope="module")
def tuned() -> Tuned:
    return tune(TuneSettings.model_validate({**SMALL, "load": 2.0}))


def test_the_best_fleet_is_found_and_every_knob_explained(tuned: Tuned) -> None:
    space, queue = tuned.space, [knob.name for knob in tuned.space.knobs].index("queue_policy")
    every = [
        space.at(space.at(space.default, 0, roles), queue, policy)
        for roles in (Roles(1, 1), Roles(0, 0, 2))
        for policy in space.knobs[queue].values
    ]
    shares = [tuned.trials.play(one, load=2.0, is_check=True).score.good_share for one in every]
    chosen = tuned.chosen
    assert chosen.check.score.good_share == max(shares)
    assert tuned.is_complete
    for knob in tuned.knobs:
        alone = None if knob.with_default is None else knob.with_default.score.order
        assert (alone is None) == (knob.chosen == knob.default)
        assert alone is None or alone > chosen.check.score.order  # or the default would have been taken
    assert [knob.name for knob in tuned.knobs if knob.is_searched] == [ROLES, "queue_policy"]


def test_the_files_are_read_by_those_they_are_for(tuned: Tuned, tmp_path: Path) -> None:
    texts = settings_files(tuned.trials, tuned.chosen.config, "told")
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    up = load(UP_SETTINGS, {}, environ={}, config=str(tmp_path / "up.yaml"))
    named = tuned.space.named(tuned.chosen.config)
    assert (Roles(up.prefill, up.decode, up.both), up.queue_policy) == (named[ROLES], named["queue_policy"])
    assert (up.block_size, up.chunk_size, up.min_remote_tokens) == (512, 512, 512)
    worker = load(WORKER_SETTINGS, {}, environ={}, config=str(tmp_path / "worker.yaml"))
    assert (worker.block_size, worker.queue_policy) == (512, up.queue_policy)
    router = load(RouterCommandSettings, {}, environ={}, config=str(tmp_path / "router.yaml"))
    assert (router.policy, router.min_remote_tokens) == ("least_load", 512)
    values = yaml.safe_load(texts["values.yaml"])
    jsonschema.validate(values, json.loads((CHART / "values.schema.json").read_text()))
    assert [values[role]["replicas"] for role in ("prefill", "decode", "both")] == [up.prefill, up.decode, up.both]


@pytest.mark.parametrize(
    ("queue", "targets"), [("auto", (150.0, 10.0)), ("slo", (150.0, 10.0)), ("fcfs", (None, None))]
)
def test_a_router_gives_targets_where_workers_go_by_them(
    tuned: Tuned, queue: str, targets: tuple[float | None, ...], tmp_path: Path
) -> None:
    at = [knob.name for knob in tuned.space.knobs].index("queue_policy")
    texts = settings_files(tuned.trials, tuned.space.at(tuned.space.default, at, queue), "told")
    (tmp_path / "router.yaml").write_text(texts["router.yaml"])
    router = load(RouterCommandSettings, {}, environ={}, config=str(tmp_path / "router.yaml"))
    assert (router.slo_ttft_ms, router.slo_tpot_ms) == targets
    assert ("BATON_SLO_TTFT_MS=150 BATON_SLO_TPOT_MS=10 baton up" in texts["up.yaml"]) == (queue != "fcfs")


def test_what_is_given_stands_where_it_is_read(tmp_path: Path) -> None:
    trials = Trials(settings(lend_blocks=False, slo_late="refuse", hedge_prefill=True, num_blocks=900, requests=5))
    texts = settings_files(trials, trials.space.default, "told")
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    up = load(UP_SETTINGS, {}, environ={}, config=str(tmp_path / "up.yaml"))
    worker = load(WORKER_SETTINGS, {}, environ={}, config=str(tmp_path / "worker.yaml"))
    router = load(RouterCommandSettings, {}, environ={}, config=str(tmp_path / "router.yaml"))
    assert up.slo_late == worker.slo_late == router.slo_late == "refuse"
    assert (up.num_blocks, worker.num_blocks, up.hedge_prefill, router.hedge_prefill) == (900, 900, True, True)
    values = yaml.safe_load(texts["values.yaml"])
    jsonschema.validate(values, json.loads((CHART / "values.schema.json").read_text()))
    assert values["kv"] == {"settings": {"lend_blocks": False}}
    assert values["prefill"]["settings"]["num_blocks"] == 900
    assert values["router"]["settings"]["slo_late"] == "refuse"
    assert "&" not in texts["values.yaml"]  # each role's settings can be changed by hand


def test_the_command_finds_the_same_to_the_last_digit_and_writes_all(
    tuned: Tuned, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items() if name != "goodput"]
    folder = tmp_path / "new" / "tuned"
    assert main(["tune", *flags, "--load=2", f"--out={folder}", "--json", "--goodput", "ttft:150", "tpot:10"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(as_object(tuned)))
    assert {path.name for path in folder.iterdir()} == {
        *("up.yaml", "worker.yaml", "router.yaml", "values.yaml", "report.html")
    }
    report = (folder / "report.html").read_text()
    assert report.count("<figure>") == 3  # the search, and the two knobs
    assert "good with this default alone" in report


def test_the_command_tells_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in ONE.items() if name != "goodput"]
    assert main(["tune", *flags, "--load=2", f"--out={tmp_path}", "--slo-ttft-ms=150", "--slo-tpot-ms=10"]) == 0
    out = capsys.readouterr().out
    assert "2 times the traffic's rate" in out
    assert "1B (given)" in out
    assert "not measured" in out


class Analytic(Trials):
    """Nothing is simulated: settings serve so many requests a second in time, 10 more for each value of `RIGHT`."""

    def outcome(
        self, config: Config, requests: Sequence[TrafficRequest], check: Callable[[], None] = lambda: None
    ) -> Outcome:
        check()
        named = self.space.named(config)
        capacity = 10.0 + sum(10.0 for name, value in RIGHT.items() if named[name] == value)
        rate = (len(requests) - 1) / requests[-1].at
        num_good = round(len(requests) * min(capacity / rate, 1.0))
        answered = [
            RequestOutcome(
                at=one.at, num_prompt_tokens=1, num_output_tokens=1, ttft_s=0.1 if number < num_good else 0.2, e2e_s=1.0
            )
            for number, one in enumerate(requests)
        ]
        return Outcome(
            requests=answered, seconds=1.0, paid_s={}, busy_s={}, num_steps=0, num_transfers=0, num_bytes=0,
            transfer_s=0.0,
        )  # fmt: skip


RIGHT = {ROLES: Roles(3, 1), "chunk_size": 2048, "max_num_seqs": 256}


def analytic(clock: Callable[[], float] = lambda: 0.0, **values: object) -> Tuned:
    made = settings(**{"goodput": "ttft:150", "arrivals": "steady", "requests": 100, "rate": 2.0, **values})
    return tune(made, play=Analytic, clock=clock)


def test_the_load_grows_until_the_best_misses_targets_and_every_knob_that_counts_is_found() -> None:
    found = analytic()
    assert found.is_complete
    assert found.space.named(found.chosen.config).items() >= RIGHT.items()
    assert found.space.num_changed(found.chosen.config) == len(RIGHT)  # what makes no difference is at its default
    loads = sorted({one.load for one in found.trials.done if not one.is_check})
    assert (loads[0], loads[-1]) == (1.0, found.load)
    shares = [found.trials.play(found.chosen.config, load=load).score.good_share for load in loads[-2:]]
    assert shares[0] >= 0.95 > shares[1]
    for knob in found.knobs:
        alone = knob.with_default
        assert (alone is not None) == (knob.name in RIGHT)
        assert alone is None or found.goodput(alone) == pytest.approx(30, abs=1)
    assert found.goodput(found.chosen.check) == pytest.approx(40, abs=1)
    held, by_default = held_rates(found)
    assert held == pytest.approx(40 / 0.95, rel=0.06)
    assert by_default == pytest.approx(10 / 0.95, rel=0.06)
    assert not hints(found)


def test_a_load_that_is_given_stays() -> None:
    found = analytic(load=3.0)
    assert {one.load for one in found.trials.done if not one.is_check} == {3.0}
    assert found.chosen.check.score.good_share == 1.0


def test_a_traffic_too_short_for_queues_to_grow_is_told() -> None:
    found = analytic(goodput="ttft:5000")  # five times of which last as long as half of the traffic
    assert found.load == found.held_load == pytest.approx(2.0, rel=0.02)
    (few,) = hints(found)
    assert few.startswith("100 requests are too few to tell what happens at more than 1.98 times the rate")
    assert "up to at least 3.96 requests/s, with the defaults up to at least 3.96." in headline(found)
    assert analytic(goodput="ttft:5000", load=3.0).held_load is None


def test_time_that_is_over_ends_the_search_and_is_told() -> None:
    def ticking() -> Callable[[], float]:
        ticks = itertools.count()
        return lambda: float(next(ticks))

    complete = analytic(ticking(), minutes=100.0)
    assert complete.is_complete
    num = len(complete.trials.done)
    for minutes in (0.3, 0.9 * num / 60):
        found = analytic(ticking(), minutes=minutes)
        assert not found.is_complete
        assert len(found.trials.done) <= 60 * minutes
        assert "minutes were over before all was tried" in hints(found)[0]
        assert found.chosen.check.score.order <= found.default.check.score.order
    with pytest.raises(ConfigError, match=r"minutes: 0\.01 are too few for the defaults alone"):
        analytic(ticking(), minutes=0.01)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"goodput": ""}, "goodput: is missing"),
        ({"goodput": "ttft:9", "slo_ttft_ms": 9}, "slo_ttft_ms: goodput has ttft, too"),
        ({"prefill": 2, "both": 0}, "decode: a fleet needs"),
        ({"workers": 3}, "workers: 3 are not 1B"),
        ({"queue_policy": "lifo"}, "queue_policy: 'lifo' is not one of"),
        ({"policy": "nearest"}, "policy: 'nearest'"),
        ({"times": "h1000"}, "times: h1000 is neither"),
        ({"requests": 1}, "requests: come all at one moment"),
        ({"arrivals": "bursts", "burst_size": 12}, "requests: come all at one moment"),
        ({"speed": 2}, "speed: means nothing without --trace"),
        ({"goodput": "ttft:0.001"}, f"{HOPELESS} medians TTFT"),
        ({"num_blocks": 1, "block_size": 16}, f"{HOPELESS} 12 of 12: no decode worker"),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError) as raised:
        tune(TuneSettings.model_validate({**ONE, "load": 1.0, **values}))
    assert raised.value.message.startswith(reason)


def test_what_cannot_be_is_said_before_the_search(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = ["--goodput", "ttft:500"]
    assert main(["tune", "--confirm", "--decode-times", "h100-8b", *target]) == 2
    assert "--prefill-times cannot be confirmed" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main(["tune", "--out", str(tmp_path / "file" / "x"), *target]) == 1
    assert "cannot be made" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------- real runs


def measured_here(folder: Path, **key: object) -> str:
    """A file as `baton profile` writes it."""
    time = simulated_time("xeon-135m").time
    here = replace(time.key, device="cpu", processor=read_cpu().name, num_threads=1)
    path = folder / "time.json"
    path.write_bytes(encode(replace(time, key=replace(here, **key))))  # type: ignore[arg-type]
    return str(path)


@pytest.mark.parametrize(
    ("key", "num_workers", "reason"),
    [
        ({}, 1, ""),
        ({"processor": "another"}, 1, "was measured on another"),
        ({"device": "cuda"}, 1, "which workers of one machine would share"),
        ({"num_threads": 1000}, 2, "2 workers of 1000 threads each are more than"),
    ],
)
def test_workers_are_real_where_their_times_were_measured(
    key: dict[str, object], num_workers: int, reason: str, tmp_path: Path
) -> None:
    found = reason_to_simulate(settings(times=measured_here(tmp_path, **key)), num_workers)
    assert found.endswith(reason) if not reason else reason in found
    assert reason_to_simulate(settings(times="h100-8b"), 1) == "h100-8b is no measurement of this machine"


def test_a_real_run_is_told_what_was_simulated(tuned: Tuned, tmp_path: Path) -> None:
    requests = tuned.trials.requests(is_check=True, load=2.0)
    short = Trials(tuned.trials.settings.model_copy(update={"confirm_seconds": requests[9].at}))
    assert served(short, 2.0) == requests[:10]
    longest = max(one.num_prompt_tokens + one.num_output_tokens for one in requests)
    flags = stack_flags(tuned.trials.settings, requests, is_simulated=True)
    assert (flags["device"], flags["simulated_time"], flags["max_model_len"]) == ("simulated", "h100-8b", longest + 64)
    assert "device" not in stack_flags(tuned.trials.settings, requests, is_simulated=False)
    (tmp_path / "tokenizer.json").write_text("{}")
    command = load_command(tuned.trials, tmp_path / "traffic.jsonl", 10, tmp_path)
    assert {"--num-prompts=10", "--goodput=ttft:150", "--goodput=tpot:10", f"--tokenizer={tmp_path}"} <= {*command}
    write_trace(tmp_path / "traffic.jsonl", requests)
    assert len((tmp_path / "traffic.jsonl").read_text().splitlines()) == 12


def test_real_runs_are_asked_for_of_the_best_and_take_no_minutes() -> None:
    asked: list[Config] = []
    now = 0.0

    def confirm(trials: Trials, config: Config, load: float) -> Confirmed:
        nonlocal now
        asked.append(config)
        now += 10_000.0
        return Confirmed(None, 0.5, "nothing", problem=f"{len(trials.requests())} requests, load {load:g}")

    found = tune(TuneSettings.model_validate({**ONE, "load": 2.0}), confirm=confirm, clock=lambda: now)
    assert asked == [one.config for one in found.finalists]
    assert found.is_complete
    assert all(one.confirmed is not None for one in found.finalists)
