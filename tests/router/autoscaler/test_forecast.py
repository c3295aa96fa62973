"""Forecasts on traffic whose truth is known."""

from __future__ import annotations

import math
import random

import pytest

from router.autoscaler.forecast import Expected, LengthForecast, RequestForecast, expected_tokens


def poisson(draw: random.Random, mean: float) -> int:
    total, number = draw.expovariate(1.0), 0
    while total < mean:
        total += draw.expovariate(1.0)
        number += 1
    return number


def test_steady_traffic_is_known_within_its_own_noise() -> None:
    draw, forecast, total = random.Random(1), RequestForecast(), 0
    for now in range(900):
        total += poisson(draw, 4.0)
        forecast.add(float(now), total)
    found = forecast.ahead(30.0)
    assert found is not None
    assert found.rate == pytest.approx(4.0, abs=3 * found.error)
    assert found.error < 0.8
    assert found.dispersion == pytest.approx(1.0, abs=0.3)


def test_nothing_is_said_before_a_bin_has_passed() -> None:
    forecast = RequestForecast()
    forecast.add(0.0, 10.0)
    forecast.add(1.0, 20.0)
    assert forecast.ahead(30.0) is None
    forecast.add(6.0, 70.0)
    found = forecast.ahead(30.0)
    assert found is not None
    assert found.rate == pytest.approx(10.0)


def test_a_ramp_goes_on() -> None:
    """From 2 to 20 requests a second in ten minutes: in 30 s there will be 0.9 more."""
    draw, forecast, total = random.Random(2), RequestForecast(), 0
    for now in range(600):
        total += poisson(draw, 2 + 18 * now / 600)
        forecast.add(float(now), total)
    found = forecast.ahead(30.0)
    assert found is not None
    assert found.rate == pytest.approx(20.9, rel=0.12)


def test_a_jump_is_followed_within_half_a_minute() -> None:
    draw, forecast, total = random.Random(3), RequestForecast(), 0
    for now in range(930):
        total += poisson(draw, 5.0 if now < 900 else 20.0)
        forecast.add(float(now), total)
    found = forecast.ahead(0.0)
    assert found is not None
    assert found.rate == pytest.approx(20.0, rel=0.3)


def rates_of(rate: float, last_rate: float, seconds: int, seed: int) -> list[float]:
    """What is forecast in each second after a quarter of an hour at `rate`, while requests come at `last_rate`."""
    draw, forecast, total, found = random.Random(seed), RequestForecast(), 0, []
    for now in range(900 + seconds):
        total += poisson(draw, rate if now < 900 else last_rate)
        forecast.add(float(now), total)
        if now >= 900 and (expected := forecast.ahead(0.0)) is not None:
            found.append(expected.rate)
    return found


@pytest.mark.parametrize(("rate", "within_s"), [(0.3, 90), (1.0, 60), (3.0, 30), (10.0, 30)])
def test_three_times_as_much_is_followed_within_a_minute(rate: float, within_s: int) -> None:
    """As soon as there are enough requests to tell it from noise."""
    late = [rates_of(rate, 3 * rate, within_s, seed)[-1] / (3 * rate) for seed in range(6)]
    assert sum(late) / len(late) == pytest.approx(1.0, abs=0.2)
    assert min(late) > 0.6


@pytest.mark.parametrize("rate", [0.1, 0.3, 1.0, 10.0])
def test_bins_without_a_request_are_no_proof_that_none_will_come(rate: float) -> None:
    found = [one / rate for seed in range(4) for one in rates_of(rate, rate, 300, seed)]
    assert sum(found) / len(found) == pytest.approx(1.0, abs=0.35)
    assert max(found) < 2.5


def test_another_counter_is_no_negative_rate() -> None:
    forecast = RequestForecast()
    for now in range(60):
        forecast.add(float(now), 10.0 * (now if now < 30 else now - 30))
    found = forecast.ahead(0.0)
    assert found is not None
    assert found.rate == pytest.approx(10.0, rel=0.05)


def test_what_each_day_has_at_this_hour_is_expected_before_it_comes() -> None:
    """A day of 9,600 s, so that a part of it is 100 s: at its half, the rate is four times as high within one part."""
    day_s, forecast, total = 9600.0, RequestForecast(9600.0), 0.0

    def play(first: int, last: int) -> float:
        nonlocal total
        for now in range(first, last, 5):
            total += 5 * (2.0 if now % day_s < day_s / 2 else 8.0)
            forecast.add(float(now), total)
        found = forecast.ahead(60.0)
        assert found is not None
        return found.rate

    before_the_first = play(0, int(day_s / 2))
    before_the_second = play(int(day_s / 2), int(day_s * 1.5))
    assert before_the_first == pytest.approx(2.0, rel=0.05)
    assert before_the_second > 3.0


def test_lengths_and_their_spread() -> None:
    draw, lengths, requests, tokens = random.Random(4), LengthForecast(), 0, 0.0
    for now in range(900):
        for _ in range(poisson(draw, 4.0)):
            requests, tokens = requests + 1, tokens + draw.lognormvariate(8.0, 0.8)
        lengths.add(float(now), requests, tokens)
    found = lengths.ahead(30.0)
    assert found is not None
    mean = math.exp(8.0 + 0.8**2 / 2)
    assert found[0] == pytest.approx(mean, rel=0.1)
    assert lengths.squared_variation == pytest.approx(math.exp(0.8**2) - 1, rel=0.35)
    # Tokens: so many requests of such lengths. Their dispersion is that of a compound Poisson process, E[L^2] / E[L].
    expected = expected_tokens(Expected(4.0, 0.1, 1.0), lengths, 30.0)
    assert expected is not None
    assert expected.rate == pytest.approx(4.0 * found[0])
    assert expected.dispersion == pytest.approx(mean * math.exp(0.8**2), rel=0.25)
