"""`baton bench serve`, sweep and compare: loads, runs, figures and reports, against endpoints that are made up."""

from __future__ import annotations

import asyncio
import csv
import io
import itertools
import json
import math
import random
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import click
import numpy as np
import pytest
from rich.console import Console

from bench.command import BENCH
from bench.load.http import Chunks
from bench.load.sse import Events
from bench.serving.compare import Verdict, compare, differences
from bench.serving.console import print_run
from bench.serving.endpoint import Answer, Question, RefusedError, Target
from bench.serving.figures import Figures, Json, figures, over_repeats
from bench.serving.files import COLUMNS, detailed_json, requests_csv
from bench.serving.find_rate import find_rate
from bench.serving.load import Conversation, Load, LoadSettings, Turn
from bench.serving.numbers import interval, percentile
from bench.serving.openai import OpenAiEndpoint
from bench.serving.outcome import Ending
from bench.serving.page import page
from bench.serving.plan import make_load
from bench.serving.run import run_load
from bench.serving.sweep import Point, System, pareto, sweep_page
from bench.serving.texts import WORDS, PlainWords
from common.errors import ConfigError, InternalError
from tests.bench.serving_fakes import FakeEndpoint, outcome, run_of
from tests.bench.test_router_bench import serving


def load(num: int, *, is_open: bool = False, max_concurrency: int | None = None, turns: int = 1) -> Load:
    turn = Turn(text=" a", num_tokens=1, max_tokens=3)
    return Load(
        conversations=[Conversation(turns=[turn] * turns)] * num, is_open=is_open, max_concurrency=max_concurrency
    )


# ------------------------------------------------------------------------------------------------------------- numbers


def test_percentiles_are_numpys() -> None:
    draw = random.Random(1)
    for num in (1, 2, 3, 10, 101):
        ordered = sorted(draw.expovariate(1) for _ in range(num))
        for percent in (0, 25, 50, 90, 99, 100):
            assert percentile(ordered, percent) == pytest.approx(np.percentile(ordered, percent))


def test_an_interval_is_students() -> None:
    found = interval([10.0, 12.0, 14.0])
    assert found.mean == 12.0
    assert found.high - found.mean == pytest.approx(4.303 * 2 / math.sqrt(3))
    assert interval([5.0]).high == math.inf


# --------------------------------------------------------------------------------------------------------------- loads


def test_a_load_is_fixed_by_its_seed() -> None:
    settings = LoadSettings(num_prompts=40, request_rate=5.0, random_input_len=7, random_output_len=9)
    one = make_load(settings, PlainWords(), "1")
    assert one == make_load(settings, PlainWords(), "1")
    other = make_load(settings, PlainWords(), "2")
    assert other.conversations[0].turns[0].text != one.conversations[0].turns[0].text
    assert one.num_requests == 40
    assert one.offered_rate == pytest.approx(5.0)
    (turn,) = one.conversations[3].turns
    assert len(turn.text.split()) == turn.num_tokens == 7
    assert turn.max_tokens == 9
    assert {*turn.text.split()} <= {*WORDS}


def test_arrivals() -> None:
    def starts(**given: object) -> list[float]:
        made = make_load(LoadSettings(random_input_len=1, **given), PlainWords(), "1")  # type: ignore[arg-type]
        return [one.start_s for one in made.conversations]

    even = starts(num_prompts=10, request_rate=2.0, burstiness=math.inf)
    assert [round(after - before, 6) for before, after in itertools.pairwise(even)] == [round(5 / 9, 6)] * 9
    bursts = starts(num_prompts=12, request_rate=2.0, burst_size=3)
    assert len({*bursts}) == 4
    ramp = starts(
        num_prompts=400, ramp_up_strategy="linear", ramp_up_start_rps=1.0, ramp_up_end_rps=9.0, burstiness=math.inf
    )
    assert ramp[1] - ramp[0] == pytest.approx(1.0, rel=0.05)
    assert ramp[-1] - ramp[-2] == pytest.approx(1 / 9)
    assert all(at < 3.0 for at in starts(duration=3.0, request_rate=4.0))
    assert starts(num_prompts=3) == [0.0] * 3


@pytest.mark.parametrize(("strategy", "first", "last"), [("linear", 1.0, 10.0), ("exponential", 10.0, 1.0)])
def test_a_ramp_with_a_duration_goes_over_all_of_it(strategy: str, first: float, last: float) -> None:
    given = LoadSettings(
        ramp_up_strategy=strategy, ramp_up_start_rps=first, ramp_up_end_rps=last, duration=60.0, random_input_len=1
    )
    mean = 5.5 if strategy == "linear" else 9 / math.log(10)
    starts = [one.start_s for one in make_load(replace(given, burstiness=math.inf), PlainWords(), "1").conversations]
    assert len(starts) == pytest.approx(60 * mean, abs=1.5)
    assert 1 / (starts[1] - starts[0]) == pytest.approx(first, rel=0.6)
    assert 1 / (starts[-1] - starts[-2]) == pytest.approx(last, rel=0.1)
    at_random = make_load(given, PlainWords(), "1").conversations
    assert len(at_random) == pytest.approx(60 * mean, rel=0.3)
    assert 55 < at_random[-1].start_s < 60
    two_turns = make_load(replace(given, burstiness=math.inf, num_turns=2), PlainWords(), "1")
    assert two_turns.num_requests == pytest.approx(60 * mean, abs=3)


def test_lengths_and_shared_beginnings() -> None:
    settings = LoadSettings(
        num_prompts=200, random_input_len=20, random_output_len=10, random_range_ratio=0.5, random_prefix_len=4
    )
    made = make_load(settings, PlainWords(), "1")
    turns = [one.turns[0] for one in made.conversations]
    assert {turn.num_tokens for turn in turns} <= {*range(14, 35)}
    assert {turn.max_tokens for turn in turns} == {*range(5, 16)}
    assert len({tuple(turn.text.split()[:4]) for turn in turns}) == 1
    assert len({tuple(turn.text.split()[:7]) for turn in turns}) == 200


def test_a_trace_has_its_own_times_lengths_and_shared_beginnings(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [(1000, 600, 7, [1, 2]), (2000, 1000, 9, [1, 3]), (4000, 10, 1, [4])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    trace.write_text("".join(json.dumps(dict(zip(names, row, strict=True))) + "\n" for row in rows))
    given = LoadSettings(dataset_name="mooncake", dataset_path=str(trace), trace_speed=2.0)
    made = make_load(given, PlainWords(), "1")
    assert [one.start_s for one in made.conversations] == [0.0, 0.5, 1.5]
    turns = [one.turns[0] for one in made.conversations]
    assert [len(turn.text.split()) for turn in turns] == [600, 1000, 10]
    assert [turn.max_tokens for turn in turns] == [7, 9, 1]
    assert turns[0].text.split()[:512] == turns[1].text.split()[:512]
    assert turns[0].text.split()[512:] != turns[1].text.split()[512:600]
    made = make_load(replace(given, length_scale=0.1, request_rate=5.0, output_len=3), PlainWords(), "1")
    assert made.offered_rate == pytest.approx(5.0)
    assert [(one.turns[0].num_tokens, one.turns[0].max_tokens) for one in made.conversations] == [
        (60, 3),
        (100, 3),
        (1, 3),
    ]
    trace.write_text("{}")
    with pytest.raises(ConfigError, match=r"--dataset-path: .* timestamp"):
        make_load(given, PlainWords(), "1")


def test_conversations_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "chats.json"
    said = [("human", "What?"), ("gpt", "x" * 40), ("human", "And then?"), ("gpt", "y" * 80)]
    path.write_text(json.dumps([{"conversations": [{"from": who, "value": text} for who, text in said]}]))
    settings = LoadSettings(dataset_name="sharegpt", dataset_path=str(path))
    (one,) = make_load(settings, PlainWords(), "1").conversations
    assert [(turn.text, turn.max_tokens) for turn in one.turns] == [("What?", 10)]
    (one,) = make_load(replace(settings, num_turns=3), PlainWords(), "1").conversations
    assert [(turn.text, turn.max_tokens) for turn in one.turns] == [("What?", 10), ("And then?", 20)]


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"dataset_name": "azure"}, "--dataset-path: is missing for azure"),
        ({"dataset_path": "x"}, "--dataset-path: does not go with random"),
        ({"ramp_up_start_rps": 1.0}, "--ramp-up-strategy: is missing"),
        ({"ramp_up_strategy": "linear"}, "--ramp-up-strategy: needs"),
        ({"burst_size": 2, "burstiness": 2.0}, "--burst-size: does not go with --burstiness"),
        ({"random_range_ratio": 1.0}, "--random-range-ratio: must be in"),
    ],
)
def test_what_does_not_go_together(given: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        LoadSettings(**given).check()  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------------------------------------- runs


async def test_a_closed_loop_has_so_many_users() -> None:
    endpoint = FakeEndpoint()
    run = await run_load(load(20, max_concurrency=3), endpoint)
    assert endpoint.most == 3
    assert [one.number for one in run.outcomes] == [*range(20)]
    assert all(one.due_s <= one.sent_s <= one.token_times_s[0] <= one.ended_s for one in run.outcomes)


async def test_a_closed_loop_goes_on_until_its_duration_ends() -> None:
    settings = LoadSettings(max_concurrency=2, duration=60.0, random_input_len=1)
    made = make_load(settings, PlainWords(), "1")
    assert made.further is not None
    assert next(made.further).turns[0].text not in ("", made.conversations[0].turns[0].text)
    assert make_load(replace(settings, num_prompts=5), PlainWords(), "1").further is None

    turn = Turn(text=" a", num_tokens=1, max_tokens=3)
    endpoint = FakeEndpoint()
    further = iter([Conversation(turns=[turn])] * 17)
    run = await run_load(replace(load(3, max_concurrency=5), further=further, stop_s=3600.0), endpoint)
    assert (len(run.outcomes), endpoint.most) == (20, 5)
    for stop_s in (0.0, 0.02):  # comes to an end, and takes none that it does not send
        endless = itertools.count(1)
        further = (Conversation(turns=[turn]) for _ in endless)
        run = await run_load(replace(load(3, max_concurrency=5), further=further, stop_s=stop_s), FakeEndpoint())
        assert next(endless) - 1 == max(len(run.outcomes) - 3, 0)


async def test_an_open_loop_sends_what_is_due_and_a_limit_makes_it_wait() -> None:
    all_here = asyncio.Event()

    def behave(_: Question) -> object:
        if endpoint.num_now == 20:
            all_here.set()
        return all_here

    endpoint = FakeEndpoint(behave=behave)
    await run_load(load(20, is_open=True), endpoint, timeout_s=60)
    assert endpoint.most == 20
    endpoint = FakeEndpoint(behave=lambda _: 0.01)
    run = await run_load(load(6, is_open=True, max_concurrency=2), endpoint)
    assert endpoint.most == 2
    last = run.outcomes[-1]
    assert last.queue_s >= 0.018
    assert last.ttft_s >= 0.027  # counts from when it was due


async def test_a_turn_has_all_that_was_said_before() -> None:
    endpoint = FakeEndpoint()
    run = await run_load(load(1, turns=3), endpoint)
    assert [question.prompt for question in endpoint.questions] == [" a", " a<1> a", " a<1> a<2> a"]
    assert [role for role, _ in endpoint.questions[-1].messages] == ["user", "assistant"] * 2 + ["user"]
    assert [one.prompt_tokens for one in run.outcomes] == [1, 2, 3]


async def test_endings_are_told_apart() -> None:
    errors = iter([RefusedError("429", "full"), RefusedError("500", "broken"), InternalError("cut off")])

    def behave(_: Question) -> object:
        error = next(errors, None)
        if error is not None:
            raise error
        return 10.0

    cancelled = Turn(text="a", num_tokens=1, max_tokens=1, cancel_after_s=0.01)
    asked = Load(
        conversations=[*load(3, turns=2).conversations, Conversation(turns=[cancelled]), *load(1).conversations],
        is_open=False,
        max_concurrency=1,
    )
    run = await run_load(asked, FakeEndpoint(behave=behave), timeout_s=1.0)
    assert [one.ending for one in run.outcomes] == ["refused", "failed", "failed", "cancelled", "failed"]
    assert [one.reason for one in run.outcomes] == [
        "429: full", "500: broken", "cut off", "", "no end of the answer within 1 s",
    ]  # fmt: skip
    assert run.num_not_sent == 3  # second turns


# ------------------------------------------------------------------------------------------------------------- figures


def test_figures_by_vllms_names() -> None:
    made = figures(run_of([outcome(0, due_s=1.0), outcome(1, due_s=2.0, ttft_s=0.3)]), {})
    assert made["completed"] == 2
    assert made["duration"] == pytest.approx(2.4)
    assert made["request_throughput"] == pytest.approx(2 / 2.4)
    assert made["output_throughput"] == pytest.approx(22 / 2.4)
    assert made["total_token_throughput"] == pytest.approx(62 / 2.4)
    assert made["mean_ttft_ms"] == pytest.approx(200)
    assert made["p99_ttft_ms"] == pytest.approx(298)
    for name in ("mean_tpot_ms", "median_tpot_ms", "median_itl_ms", "p99_itl_ms"):
        assert made[name] == pytest.approx(10)
    assert made["mean_e2el_ms"] == pytest.approx(300)
    assert made["valid"] is True
    assert {"total_input_tokens", "total_output_tokens", "std_ttft_ms", "max_concurrent_requests"} <= made.keys()


def test_an_address_is_printed_as_it_is() -> None:
    out = io.StringIO()
    settings = {"model_id": "[m]", "base_url": "http://[fd00::a]:8000", "backend": "openai"}
    print_run(settings, figures(run_of([outcome(0)]), {}), Console(file=out, width=100))
    assert out.getvalue().startswith("[m] at http://[fd00::a]:8000 (openai)")


def test_goodput_counts_requests_that_meet_every_target() -> None:
    targets = {"ttft": 150.0, "tpot": 15.0, "e2el": 1000.0}
    outcomes = [
        outcome(0),
        outcome(1, ttft_s=0.2),
        outcome(2, gap_s=0.02),
        outcome(3, ending=Ending.REFUSED),
        outcome(4, ending=Ending.CANCELLED),
        outcome(5, due_s=9.9, ttft_s=0.1, num_tokens=1),
    ]
    made = figures(run_of(outcomes), targets)
    assert made["duration"] == pytest.approx(10)
    assert made["request_goodput"] == pytest.approx(0.2)
    assert made["token_goodput"] == pytest.approx(1.2)
    assert made["good_request_fraction"] == pytest.approx(2 / 5)  # nobody judges what the client gave up
    assert [made[name] for name in ("completed", "failed", "refused", "cancelled")] == [4, 0, 1, 1]


def test_warm_up_is_told_apart() -> None:
    made = figures(run_of([outcome(0, ttft_s=5.0), outcome(1, due_s=2.0)]), {}, warm_up_s=1.0)
    assert (made["completed"], made["warmup_completed"]) == (1, 1)
    assert made["mean_ttft_ms"] == pytest.approx(100)
    assert made["duration"] == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"lag_s": 0.05}, "requests were sent late: 50.0 ms in the 99th percentile, limit 10.0 ms"),
        ({"loop_lags_s": [0.03]}, "the client's event loop was late: 30.0 ms in the 99th percentile, limit 10.0 ms"),
        ({"client_cpu": 0.95}, "the client took 95% of a core"),
    ],
)
def test_a_run_is_invalid_if_the_client_was_the_bottleneck(given: dict[str, object], reason: str) -> None:
    lag_s = given.pop("lag_s", 0.0)
    made = figures(run_of([outcome(lag_s=lag_s)], **given), {})  # type: ignore[arg-type]
    assert made["valid"] is False
    assert made["invalid_reasons"] == [reason]


def test_a_lag_that_is_small_beside_the_ttft_is_no_matter() -> None:
    assert figures(run_of([outcome(lag_s=0.05, ttft_s=1.0)]), {})["valid"] is True
    assert figures(run_of([outcome(lag_s=0.05, ttft_s=1.0)]), {}, max_lag_s=0.04)["valid"] is False


def test_repeats_give_means_and_intervals() -> None:
    runs = [figures(run_of([outcome(ttft_s=ttft_s)], client_cpu=cpu), {}) for ttft_s, cpu in ((0.1, 0.1), (0.3, 1.0))]
    made = over_repeats(runs)
    assert made["mean_ttft_ms"] == pytest.approx(200)
    bounds = made["confidence_95"]
    assert isinstance(bounds, dict)
    assert bounds["mean_ttft_ms"] == pytest.approx([200 - 12.706 * 100, 200 + 12.706 * 100])
    assert made["valid"] is False
    assert made["invalid_reasons"] == ["repeat 2: the client took 100% of a core"]
    assert made["repeats"] == runs


async def test_find_rate_ends_just_below_what_is_too_much() -> None:
    asked: list[float] = []

    async def measure(rate: float) -> Figures:
        asked.append(rate)
        return {"valid": True, "good_request_fraction": 1.0 if rate <= 11.3 else 0.5}

    found = await find_rate(measure, start=1.0, good_fraction=0.99, tolerance=0.05)
    assert 11.3 / 1.06 <= found.rate <= 11.3
    assert asked[:5] == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert found.best is not None
    found = await find_rate(measure, start=100.0, good_fraction=0.99, tolerance=0.05)
    assert 11.3 / 1.06 <= found.rate <= 11.3


async def test_find_rate_ends_where_the_client_is_too_slow() -> None:
    async def measure(rate: float) -> Figures:
        return {"valid": rate < 4, "invalid_reasons": ["slow"], "good_request_fraction": 1.0}

    found = await find_rate(measure, start=1.0, good_fraction=0.99, tolerance=0.05)
    assert found.rate == 2.0
    assert "the client was too slow: slow" in found.reason


# ----------------------------------------------------------------------------------------------------------- endpoints


def event(text: str | None = None, **others: object) -> bytes:
    choices = [] if text is None else [{"index": 0, "text": text, "finish_reason": None}]
    return b"data: " + json.dumps({"choices": choices, **others}).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


USAGE = {"prompt_tokens": 5, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
STREAM = event("one ") + b": a comment\n\n" + event("two") + event(usage=USAGE) + b"data: [DONE]\n\n"
OK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_a_stream_is_read_however_it_is_cut() -> None:
    body = chunk(STREAM[:9]) + chunk(STREAM[9:50]) + chunk(STREAM[50:]) + b"0\r\nTrailer: x\r\n\r\n"
    whole: list[bytes] | None = None
    for size in (1, 7, len(body)):
        chunks, events = Chunks(), Events()
        found: list[bytes] = []
        for at in range(0, len(body), size):
            found += events.feed(chunks.feed(body[at : at + size]))
        assert chunks.is_done
        assert len(found) == 4
        assert found == (whole or found)
        whole = found
    with pytest.raises(InternalError, match="a chunk of the answer begins with"):
        Chunks().feed(b"HTTP/1.1\r\n")


@asynccontextmanager
async def endpoint_that_says(*answers: bytes, is_chat: bool = False) -> AsyncIterator[OpenAiEndpoint]:
    """One answer for each request, after which the connection is closed."""
    left = iter(answers)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"Content-Length: (\d+)", head)
        await reader.readexactly(int(length[1]) if length else 0)
        writer.write(next(left))
        writer.close()

    async with serving(answer) as url:
        endpoint = OpenAiEndpoint(Target(name="", backend="openai", url=f"{url}/v1", model="m"), is_chat=is_chat)
        try:
            yield endpoint
        finally:
            await endpoint.close()


QUESTION = Question(messages=[("user", "hello")], max_tokens=2)


async def test_what_an_openai_server_streams() -> None:
    listed = b'{"data": [{"id": "the-model"}]}'
    models = f"HTTP/1.1 200 OK\r\nContent-Length: {len(listed)}\r\n\r\n".encode() + listed
    async with endpoint_that_says(models, OK + chunk(STREAM) + b"0\r\n\r\n") as endpoint:
        assert await endpoint.model() == "the-model"
        answer = Answer()
        await endpoint.ask(QUESTION, answer)
    assert "".join(answer.text) == "one two"
    assert len(answer.token_times) == 2
    assert (answer.prompt_tokens, answer.output_tokens, answer.cached_tokens) == (5, 2, 4)


async def test_a_chat_begins_with_its_first_text_not_with_its_role() -> None:
    deltas: list[dict[str, object]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "yes"},
        {"tool_calls": [{"index": 0}]},
        {"tool_calls": None},
        {},
    ]
    stream = b"".join(event(choices=[{"index": 0, "delta": delta}]) for delta in deltas)
    async with endpoint_that_says(OK + chunk(stream) + b"0\r\n\r\n", is_chat=True) as endpoint:
        answer = Answer()
        await endpoint.ask(QUESTION, answer)
    assert (answer.text, len(answer.token_times)) == (["hm", "yes"], 3)


@pytest.mark.parametrize(
    ("answer", "line", "has_no_room"),
    [
        (b"HTTP/1.1 429 Too Many\r\nContent-Length: 4\r\n\r\nfull", "429: Too Many full", True),
        (b"HTTP/1.1 503 Gone\r\n\r\nno worker", "503: Gone no worker", True),
        (
            b"HTTP/1.1 400 Bad\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(b"why") + b"0\r\n\r\n",
            "400: Bad why",
            False,
        ),
        (OK + chunk(event("one")), "the answer was cut off", None),
        (OK + chunk(b'data: {"error": {"message": "out of memory"}}\n\n') + b"0\r\n\r\n", "out of memory", None),
        (OK + chunk(b"data: {\n\n") + b"0\r\n\r\n", "an event of the answer is of no use", None),
    ],
)
async def test_what_goes_wrong_is_told(answer: bytes, line: str, has_no_room: bool | None) -> None:
    async with endpoint_that_says(answer) as endpoint:
        with pytest.raises(InternalError, match=line) as caught:
            await endpoint.ask(QUESTION, Answer())
    assert getattr(caught.value, "has_no_room", None) is has_no_room


# ------------------------------------------------------------------------------------------------------------- reports


def test_the_page_needs_nothing_else_and_quotes_what_it_shows() -> None:
    outcomes = [outcome(number, due_s=number / 10, ttft_s=0.1 + number / 1000, num_tokens=3) for number in range(2500)]
    outcomes.append(outcome(2500, due_s=500, ending=Ending.FAILED, reason="<script>"))
    made = figures(run_of(outcomes), {"ttft": 150.0})
    text = page("a <b> model", {"goodput": {"ttft": 150.0}}, made, [outcomes])
    assert not re.search(r"(src|href)=|url\(|@import|<script|<b> model", text)
    assert text.count("<figure>") == 8
    assert "target" in text
    assert len(text) < 500_000


def test_warm_up_is_marked_and_left_out_of_distributions() -> None:
    outcomes = [outcome(0, ttft_s=5.0), *(outcome(number, due_s=1.0 + number) for number in (1, 2))]
    settings: dict[str, Json] = {"warmup_seconds": 1.0, "goodput": {"ttft": 500.0}}
    text = page("a model", settings, figures(run_of(outcomes), {}, warm_up_s=1.0), [outcomes])
    assert "TTFT: 100.0% within 500 ms" in text
    assert "warm-up</span>" in text
    assert "warm-up</span>" not in page("a model", {}, figures(run_of(outcomes), {}), [outcomes])
    rows = csv.DictReader(io.StringIO(requests_csv([outcomes], warm_up_s=1.0)))
    assert [row["is_warm_up"] for row in rows] == ["1", "0", "0"]
    assert detailed_json(outcomes, warm_up_s=1.0)["is_warm_up"] == [True, False, False]


def test_a_line_of_csv_for_each_request() -> None:
    text = requests_csv([[outcome(0), outcome(1, ending=Ending.REFUSED, reason='full, "really"')], [outcome(0)]])
    rows = list(csv.DictReader(io.StringIO(text)))
    assert [*rows[0]] == [*COLUMNS]
    assert [row["repeat"] for row in rows] == ["1", "1", "2"]
    assert (rows[0]["ttft_ms"], rows[0]["tpot_ms"], rows[0]["e2el_ms"]) == ("100.000", "10.000", "200.000")
    assert (rows[1]["ending"], rows[1]["ttft_ms"], rows[1]["reason"]) == ("refused", "", 'full, "really"')


def test_compare_says_what_is_better() -> None:
    base: Figures = {"request_throughput": 10.0, "mean_ttft_ms": 100.0, "p99_tpot_ms": 9.0, "failed": 0, "seed": 1}
    other: Figures = {"request_throughput": 12.0, "mean_ttft_ms": 150.0, "p99_tpot_ms": 9.0, "failed": 2, "seed": 2}
    rows = {row.name: row for row in compare(base, other)}
    assert {name: row.verdict for name, row in rows.items()} == {
        "request_throughput": Verdict.BETTER,
        "mean_ttft_ms": Verdict.WORSE,
        "p99_tpot_ms": Verdict.SAME,
        "failed": Verdict.WORSE,
    }
    assert rows["mean_ttft_ms"].change == pytest.approx(0.5)
    assert rows["failed"].change is None
    base["confidence_95"] = {"mean_ttft_ms": [60.0, 140.0]}
    other["confidence_95"] = {"mean_ttft_ms": [130.0, 170.0]}
    assert {row.name: row.verdict for row in compare(base, other)}["mean_ttft_ms"] is Verdict.UNSURE
    assert differences({"request_rate": 4.0}, {"request_rate": 5.0, "valid": False}) == [
        "request_rate is 4.0 and 5.0",
        "the second is not valid: the client was the bottleneck",
    ]


def test_compare_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, rate in (("a.json", 10.0), ("b.json", 9.0)):
        (tmp_path / name).write_text(json.dumps({"request_throughput": rate}))
    (tmp_path / "c.json").write_text("[]")
    a, b, c = (str(tmp_path / name) for name in ("a.json", "b.json", "c.json"))
    assert BENCH.main(["compare", a, b, "--json"], standalone_mode=False) == 0
    (row,) = json.loads(capsys.readouterr().out)["comparisons"][0]["figures"]
    assert (row["change"], row["verdict"]) == (pytest.approx(-0.1), "worse")
    assert BENCH.main(["compare", a, b, "--fail-above", "5"], standalone_mode=False) == 1
    assert BENCH.main(["compare", a, b, "--fail-above", "15"], standalone_mode=False) == 0
    assert BENCH.main(["compare", a, c], standalone_mode=False) == 2
    assert "is no result of a run" in capsys.readouterr().err


def test_the_pareto_front() -> None:
    def point(users: int, tpot_ms: float, tokens: float, *, valid: bool = True) -> Point:
        made: Figures = {"median_tpot_ms": tpot_ms, "output_throughput": tokens, "valid": valid}
        return Point(System(name="a"), math.inf, users, made, {})

    points = [
        point(1, 10, 100),
        point(4, 20, 300),
        point(8, 25, 200),
        point(16, 50, 400),
        point(2, 1, 9e9, valid=False),
    ]
    assert [one.max_concurrency for one in pareto(points)] == [16, 4, 1]
    text = sweep_page(points, {"ttft": 100.0})
    assert "Pareto front" in text
    assert "invalid" in text


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["serve", "--request-rate", "0"], "'0' is no number above 0"),
        (["serve", "--backend", "soap"], "'soap' is not one of"),
        (["sweep", "--pd", "1x2"], "'1x2' is not PREFILL:DECODE"),
        (["sweep", "--concurrencies", "1,0"], "a number that is not above 0"),
    ],
)
def test_asked_wrongly(arguments: list[str], line: str) -> None:
    with pytest.raises(click.BadParameter) as caught:
        BENCH.main(arguments, standalone_mode=False)
    assert line in caught.value.format_message()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["serve", "-o", "a.pdf"], "--output: 'a.pdf' does not end in .json, .csv, .html"),
        (["serve", "--base-url", "localhost"], "--base-url: 'localhost' is no URL"),
        (["serve", "--backend", "baton", "--base-url", "http://x"], "--base-url: 'http://x' is no gRPC address"),
        (["serve", "--extra-body", "["], "--extra-body: is no JSON"),
        (["serve", "--goodput", "ttft:5", "itl:5"], "--goodput: 'itl' is not one of"),
        (["serve", "--find-rate"], "--find-rate: needs --goodput"),
        (["sweep"], "--request-rates: or --concurrencies must be given"),
    ],
)
def test_settings_that_are_wrong(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert BENCH.main(arguments, standalone_mode=False) == 2
    assert line in capsys.readouterr().err
