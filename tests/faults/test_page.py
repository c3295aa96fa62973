"""The table is whole, and the page says what it says."""

from __future__ import annotations

from tests.faults.matrix import CELLS, CONNECTORS, Counted, End, Fault, Moment, Process, expected
from tests.faults.test_matrix import NUM_PARTS, QUICK, cases, sixth
from tools.faults_page import PATH, text


def test_the_page_is_current() -> None:
    assert PATH.read_text() == text(), "python -m tools.faults_page --write"


def test_every_cell_has_an_outcome_or_a_reason() -> None:
    assert len(CELLS) == len(set(CELLS)) == 9 * 6 * 7
    for connector in CONNECTORS:
        for cell in CELLS:
            outcome = expected(cell, connector)
            assert bool(outcome.why) == (outcome.end is End.NOT_POSSIBLE), cell
            assert not outcome.counted & outcome.may_count, cell


def test_every_possible_cell_is_tested() -> None:
    tested = {case.cell for case in cases() if case.connector == "shared_storage"}
    assert tested == {cell for cell in CELLS if expected(cell, "shared_storage").end is not End.NOT_POSSIBLE}
    assert tested >= QUICK
    # If the table has another outcome for memory-to-memory connectors, that one is tested, too.
    direct = {case.cell for case in cases() if case.connector == "nixl"}
    differing = {cell for cell in tested if expected(cell, "nixl") != expected(cell, "shared_storage")}
    assert direct >= {cell for cell in differing if cell.process is not Process.STORE}
    by_server = {case.cell for case in cases() if case.connector == "lmcache"}
    differing = {cell for cell in CELLS if expected(cell, "lmcache") != expected(cell, "shared_storage")}
    assert by_server >= {cell for cell in differing if expected(cell, "lmcache").end is not End.NOT_POSSIBLE}


def test_six_parts_are_the_whole_matrix() -> None:
    parts = [sixth(cases(), number) for number in range(1, NUM_PARTS + 1)]
    assert {case for part in parts for case in part} == set(cases())
    for part in parts:
        struck = {(case.connector, case.cell.process, case.cell.fault) for case in part}
        assert struck == {(case.connector, case.cell.process, case.cell.fault) for case in cases()}
        assert len({(case.connector, case.cell) for case in part}) == len(struck), "one moment of each"
        assert {case.cell.moment for case in part if case.connector == "shared_storage"} == set(Moment)


def test_what_is_counted_fits_the_end() -> None:
    for cell in CELLS:
        outcome = expected(cell, "shared_storage")
        if cell.fault is Fault.CANCEL and outcome.end is not End.NOT_POSSIBLE:
            assert outcome.counted == {Counted.CANCELLED}
        if outcome.end is End.SAME_ANSWER:
            assert not outcome.counted & {Counted.CANCELLED, Counted.DEADLINE}
