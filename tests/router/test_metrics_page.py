"""How often the page for Prometheus is made."""

from __future__ import annotations

from router.api.rest.metrics_page import BURST_S, SHARE, MetricsPage

PAGE_S = 0.01  # what making a page takes


class Made:
    """A page whose making takes `PAGE_S`, of a number that grows with each one made."""

    def __init__(self) -> None:
        self.num = 0
        self.now = 50.0
        self.cpu = 7.0
        self.page = MetricsPage(self._make, lambda: self.now, lambda: self.cpu)

    def _make(self, _is_openmetrics: bool) -> bytes:
        self.num += 1
        self.cpu += PAGE_S
        return str(self.num).encode()


def test_every_page_is_a_new_one_for_whoever_asks_now_and_then() -> None:
    made = Made()
    for number in range(1, 1000):
        assert made.page.get() == str(number).encode()
        made.now += 0.2


def test_pages_take_a_tenth_of_the_time_at_most_however_often_they_are_asked_for() -> None:
    made, seconds = Made(), 60
    for _ in range(seconds * 1000):
        made.now += 0.001
        made.page.get()
    assert made.num * PAGE_S <= seconds * SHARE + BURST_S + PAGE_S
    assert made.num * PAGE_S >= seconds * SHARE - PAGE_S, "others wait for no page that could be made"


def test_a_page_is_made_anew_once_there_is_time_again() -> None:
    made = Made()
    for _ in range(1000):
        made.page.get()
    last = made.num
    assert last < 100
    assert made.page.get() == str(last).encode()
    made.now += PAGE_S / SHARE
    assert made.page.get() == str(last + 1).encode()
