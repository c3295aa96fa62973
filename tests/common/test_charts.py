"""Charts: where points, lines and ticks lie."""

from __future__ import annotations

import re

from common.charts import Axis, Level, Series, chart, key


def dots(text: str) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in re.findall(r"<circle cx='([\d.]+)' cy='([\d.]+)'", text)]


def ticks(text: str) -> list[str]:
    return re.findall(r"text-anchor='(?:middle|end)'>([^<]*)<", text)


def test_points_lie_by_their_values() -> None:
    text = chart(
        "a", Axis(title="x"), Axis(title="y"), [Series(name="s", points=[(0, 0), (5, 1), (10, 2)], kind="dots")]
    )
    (x1, y1), (x2, y2), (x3, y3) = dots(text)
    assert abs((x2 - x1) - (x3 - x2)) < 0.2
    assert y1 > y2 > y3  # up
    assert {"0", "2", "10", "0.5"} <= {*ticks(text)}
    assert chart("a", Axis(title="x"), Axis(title="y"), [Series(name="s", points=[])]) == ""


def test_a_logarithmic_axis_has_equal_steps_for_equal_factors() -> None:
    points = [(1.0, 1.0), (10.0, 1.0), (100.0, 1.0)]
    text = chart("a", Axis(title="x", is_log=True), Axis(title="y"), [Series(name="s", points=points, kind="dots")])
    (x1, _), (x2, _), (x3, _) = dots(text)
    assert abs((x2 - x1) - (x3 - x2)) < 0.2
    assert {"1", "10", "100"} <= {*ticks(text)}


def test_an_axis_with_bounds_and_ticks_of_its_own() -> None:
    up = Axis(title="error", low=-0.3, high=0.3, ticks=(-0.3, 0, 0.3), written="{:+.0%}".format)
    points = [(1.0, 0.3), (2.0, 7.0), (3.0, -7.0)]
    text = chart("a", Axis(title="x"), up, [Series(name="s", points=points, kind="dots")], [Level(0.0, "none")])
    (_, inside), (_, above), (_, below) = dots(text)
    assert above <= inside < below  # what is beyond the bounds lies at the edge
    assert below - above < 210
    assert {"-30%", "+0%", "+30%", "none"} <= {*ticks(text)}


def test_targets_and_the_line_of_equal_values() -> None:
    axis = Axis(title="ms", is_log=True, low=1.0, high=100.0)
    text = chart(
        "a",
        axis,
        axis,
        [Series(name="s", points=[(10.0, 10.0)], kind="dots")],
        [Level(10.0, "limit", is_upright=True)],
        has_diagonal=True,
    )
    ((x, y),) = dots(text)
    diagonal, limit = re.findall(
        r"<line x1='([^']*)' y1='([^']*)' x2='([^']*)' y2='([^']*)' stroke='\S+' stroke-dash", text
    )
    x1, y1, x2, y2 = map(float, diagonal)
    assert abs((y - y1) / (y2 - y1) - (x - x1) / (x2 - x1)) < 0.01
    assert float(limit[0]) == float(limit[2]) == x


def test_names_are_quoted_and_told_once() -> None:
    line = [(0.0, 1.0), (1.0, 2.0)]
    series = [Series(name="a <b>", points=line), Series(name="'c'", points=line, kind="dots", hints=["<1>", ""])]
    text = chart("<t>", Axis(title="<x>"), Axis(title="y"), series)
    assert "<b>" not in text.replace("<b style", "")
    assert "&lt;1&gt;</title>" in text
    assert text.count("<title>") == 1
    assert "class='key'" in text
    assert "class='key'" not in chart("t", Axis(title="x"), Axis(title="y"), series, has_key=False)
    assert "a &lt;b&gt;" in key({"a <b>": "#123456"})
