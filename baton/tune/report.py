"""What a search found as one HTML page without scripts."""

from __future__ import annotations

import html
from collections.abc import Iterable, Iterator, Sequence

from baton.tune.knobs import Roles, Value
from baton.tune.tuning import ENOUGH, Finalist, Tuned
from common.charts import STYLE, Axis, Level, Point, Series, chart

_SHARES = Axis(title="good answers", low=0.0, high=1.0, ticks=(0, 0.25, 0.5, 0.75, 1), written="{:.0%}".format)


def headline(tuned: Tuned) -> str:
    """What was found, in a few sentences."""
    targets = ", ".join(f"{name.upper()} up to {ms:g} ms" for name, ms in tuned.trials.goodput.items())
    chosen, default = tuned.chosen.check, tuned.default.check
    rate = tuned.trials.rate(is_check=True, load=tuned.load)
    ours, theirs = held_rates(tuned)
    held = ""
    if ours is not None and theirs is not None:
        held = (
            f"{ENOUGH:.0%} are up to {_rate(tuned, ours)} requests/s, with the defaults up to {_rate(tuned, theirs)}."
        )
    return (
        f"Good answers have {targets}. At {rate:.3g} requests/s, {tuned.load:.3g} times the traffic's rate, "
        f"{chosen.score.good_share:.1%} are good, {tuned.goodput(chosen):.3g} a second; with the defaults "
        f"{default.score.good_share:.1%}, {tuned.goodput(default):.3g} a second. {held}"
    ).strip()


def _rate(tuned: Tuned, held: float) -> str:
    most = tuned.trials.rate(is_check=True, load=tuned.trials.max_load)
    return f"at least {held:.3g}" if held == most else f"{held:.3g}"


def held_rates(tuned: Tuned) -> tuple[float | None, float | None]:
    """Requests a second at which `ENOUGH` answers are good, with the chosen settings and with the defaults. None:
    it is not known."""
    ours, theirs = (
        None if load is None else tuned.trials.rate(is_check=True, load=load)
        for load in (tuned.held_load, tuned.held_by_default)
    )
    return ours, theirs


def hints(tuned: Tuned) -> list[str]:
    """Why the search may have missed something."""
    found = []
    if not tuned.is_complete:
        found.append(f"The {tuned.trials.settings.minutes:g} minutes were over before all was tried (--minutes).")
    num, target = len(tuned.trials.requests()), tuned.trials.max_load
    if tuned.held_load == target or tuned.load > target:
        found.append(
            f"{num} requests are too few to tell what happens at more than {target:.3g} times the rate, since "
            "the traffic gets too short for queues to grow (--requests)."
        )
    return found


def page(tuned: Tuned) -> str:
    space = tuned.space
    told = "".join(f"<p class='bad'>{html.escape(one)}</p>" for one in hints(tuned))
    parts = [
        "<!doctype html><html lang='en'><meta charset='utf-8'><title>Baton: settings for a traffic</title>",
        f"<style>{STYLE}</style><h1>Settings for a traffic</h1><p>{html.escape(headline(tuned))}</p>{told}",
        f"<p>Times of steps: {html.escape('; '.join(tuned.trials.sources))}. Simulated, so equal seeds give equal "
        f"figures on every machine. {len(tuned.trials.done)} simulations.</p>",
        "<h2>Knobs</h2>",
        knob_table(tuned),
        _search(tuned),
        *(_of_knob(tuned, index) for index in range(len(space.knobs))),
        "<h2>The best</h2>",
        _finalists(tuned),
    ]
    return "\n".join(parts) + "</html>\n"


KNOB_HEADS = ("knob", "chosen", "default", "good with this default alone", "good a second")


def knob_rows(tuned: Tuned) -> Iterator[tuple[str, str, str, str, str]]:
    """Knob, chosen value, default, and good answers with the default for that knob alone: their share, and how many a
    second."""
    for knob in tuned.knobs:
        share = rate = ""
        if knob.with_default is not None:
            share = f"{knob.with_default.score.good_share:.1%}"
            rate = f"{tuned.goodput(knob.with_default):.3g}"
        elif knob.chosen == knob.default:
            share = "the same"
        else:
            share = "not tried"
        chosen = shown(knob.chosen) + ("" if knob.is_searched else " (given)")
        yield knob.name, chosen, shown(knob.default), share, rate


def shown(value: object) -> str:
    return "unset" if value is None else str(value)


def knob_table(tuned: Tuned) -> str:
    return _table(KNOB_HEADS, knob_rows(tuned))


def finalist_rows(tuned: Tuned) -> tuple[Sequence[str], list[tuple[str, ...]]]:
    """Heads and rows: each of the best, and the defaults, with good answers at the load and at the traffic's own rate;
    after real runs also what these found beside what was expected of them."""
    listed = [*tuned.finalists]
    rows: list[tuple[str, ...]] = []
    if all(one.config != tuned.default.config for one in listed):
        listed.append(tuned.default)
    is_confirmed = any(one.confirmed is not None for one in listed)
    for one in listed:
        real: tuple[str, ...] = ()
        if one.confirmed is not None:
            share = one.confirmed.good_share
            found = "failed" if share is None else f"{share:.1%}"
            real = found, f"{one.confirmed.expected:.1%}", one.confirmed.problem
        elif is_confirmed:
            real = "", "", ""
        rows.append(
            (
                changes(tuned, one),
                "chosen" if one.config == tuned.chosen.config else "",
                f"{one.check.score.good_share:.1%}",
                f"{one.own_rate.score.good_share:.1%}",
                *real,
            )
        )
    heads = ("settings", "", "good", "at the traffic's own rate")
    return (*heads, "real run", "expected of it", "problem") if is_confirmed else heads, rows


def changes(tuned: Tuned, one: Finalist) -> str:
    """The knobs that are not at their defaults."""
    pairs = zip(tuned.space.knobs, one.config, strict=True)
    found = [f"{knob.name} {shown(value)}" for knob, value in pairs if value != knob.default]
    return ", ".join(found) or "the defaults"


def _finalists(tuned: Tuned) -> str:
    how = next((one.confirmed.how for one in tuned.finalists if one.confirmed is not None), "")
    told = f"<p>Real runs: {html.escape(how)}. Beside each stands what a simulation says of the same requests.</p>"
    return (told if how else "") + _table(*finalist_rows(tuned))


def _search(tuned: Tuned) -> str:
    """Each simulation of all requests, in order, and the best so far."""
    num = len(tuned.trials.requests())
    shares = [
        one.score.good_share
        for one in tuned.trials.done
        if not one.is_check and one.load == tuned.load and one.num_requests == num
    ]
    best: list[Point] = []
    for number, share in enumerate(shares):
        best.append((number, max(share, best[-1][1] if best else 0.0)))
    tried = Series(name="tried", points=[*enumerate(shares)], kind="dots")
    level = Level(tuned.default.check.score.good_share, "defaults", colour="#6b7280")
    return chart(
        "the search",
        Axis(title="simulations"),
        _SHARES,
        [tried, Series(name="best", points=best, kind="steps")],
        [level],
    )


def _of_knob(tuned: Tuned, index: int) -> str:
    """Good answers by the values of one knob, as far as the search tried them beside the chosen others."""
    num, chosen = len(tuned.trials.requests()), tuned.chosen.config
    knob = tuned.space.knobs[index]
    found = {
        one.config[index]: one.score.good_share
        for one in tuned.trials.done
        if not one.is_check and one.load == tuned.load and one.num_requests == num
        if all(value == chosen[at] for at, value in enumerate(one.config) if at != index)
    }
    if len(found) < 2:
        return ""
    ordered = sorted(found, key=_place)
    names = [shown(value) for value in ordered]
    points = [(float(place), found[value]) for place, value in enumerate(ordered)]
    hints = [f"{name}: {share:.1%}" for name, (_, share) in zip(names, points, strict=True)]
    ticks = tuple(float(place) for place in range(len(names)))
    axis = Axis(title=knob.name, low=0.0, ticks=ticks, written=lambda place: names[int(place)])
    levels = [Level(found[chosen[index]], f"chosen: {shown(chosen[index])}")] if chosen[index] in found else []
    return chart(knob.name, axis, _SHARES, [Series(name="good", points=points, kind="marks", hints=hints)], levels)


def _place(value: Value) -> float:
    """On the axis. Words stay as they were tried."""
    if isinstance(value, Roles):
        return value.prefill
    return value if isinstance(value, int) else -1


def _table(heads: Sequence[str], rows: Iterable[tuple[str, ...]]) -> str:
    head = "".join(f"<th>{html.escape(one)}" for one in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}" for cell in row) + "</tr>" for row in rows)
    return f"<div class='wide'><table><tr>{head}</tr>{body}</table></div>"
