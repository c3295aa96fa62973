"""A device without weights: times of steps, tokens that follow from the KV, and KV that is not what was written."""

from __future__ import annotations

from array import array
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from baton.cli.main import main
from common.batch_time import StepShape
from common.batch_time_file import encode
from common.config import EngineSettings
from common.errors import ConfigError
from common.sampling import SamplingParams
from engine.core import EngineCore
from engine.replay.recorder import RecordingDevice
from engine.replay.step_file import StepFileHeader, StepFileWriter
from engine.sampling.draws import draw
from engine.simulated.data_sheet import SHEETS, simulated_time
from engine.simulated.device import SimulatedDevice
from engine.step import Draw, Drawn, LogitEdits, Scoring, StepInput, StepRow, shape_of
from kv_store.no_store import NoStore
from tests.engine.tiny_models import FAMILIES, make_model
from tests.support.fake_device import add, assert_idle, run, tokens_of

BLOCK_SIZE = 4
PROMPT = list(range(5, 27))
LIKELIEST = draw(SamplingParams(temperature=0.0), 0)


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("model") / "llama", FAMILIES["llama"])
    (folder / "model.safetensors").write_bytes(b"")  # nobody reads it
    return folder


def make(model_dir: Path, clock: Clock | None = None, **settings: object) -> SimulatedDevice:
    clock = clock or Clock()
    given = EngineSettings.model_validate(
        {"device": "simulated", "block_size": BLOCK_SIZE, "num_blocks": 64, "max_model_len": 128, **settings}
    )
    return SimulatedDevice(model_dir, given, clock=lambda: clock.now, sleep=clock.sleep)


def answer(
    device: SimulatedDevice, prompt: list[int], sizes: list[int], number: int, first_block: int = 0
) -> list[int]:
    """`number` tokens that follow `prompt`, of which chunks of `sizes` are computed, then the rest."""
    blocks = list(range(first_block, first_block + 16))
    start, tokens = 0, list(prompt)
    for size in sizes:
        device.execute([StepRow(token_ids=prompt[start : start + size], num_computed_tokens=start, block_ids=blocks)])
        start += size
    while len(tokens) < len(prompt) + number:
        row = StepRow(token_ids=tokens[start:], num_computed_tokens=start, block_ids=blocks, draw=LIKELIEST)
        (drawn,) = device.execute([row])
        assert drawn is not None
        start = len(tokens)
        tokens.append(drawn.token_id)
    return tokens[len(prompt) :]


def test_tokens_follow_from_the_context_alone(model_dir: Path) -> None:
    whole = answer(make(model_dir), PROMPT, [], 12)
    assert len(set(whole)) > 6
    device = make(model_dir)
    for sizes, first_block in (([7, 5], 3), ([1, 1, 1, 8], 21), ([21], 40)):
        assert answer(device, PROMPT, sizes, 12, first_block) == whole
    assert answer(device, [9, *PROMPT[1:]], [], 12) != whole
    assert not {*whole} & {*device.info.eos_token_ids}


def test_kv_that_was_changed_fails_the_row_alone(model_dir: Path) -> None:
    device = make(model_dir)
    answer(device, PROMPT, [], 1)
    answer(device, PROMPT, [], 1, first_block=20)  # the device has just written this one
    cache: npt.NDArray[np.float32] = np.asarray(device.planes()[0].cache)  # the same memory
    rows = [
        StepRow(token_ids=[1], num_computed_tokens=20, block_ids=list(range(first, first + 16)), draw=LIKELIEST)
        for first in (0, 20)
    ]
    assert not device.compute(rows).failures
    for block, plane, slot in ((0, 0, 0), (2, 1, 3), (4, 0, 2)):
        kept = cache[block].copy()
        cache.view(np.uint32)[block, 0, plane, 0, slot] ^= 1
        device.copy([])
        assert device.compute(rows).failures == {0: "the KV of 20 tokens is not what was written"}, (block, plane, slot)
        cache[block] = kept
    device.copy([])
    assert not device.compute(rows).failures


def test_blocks_in_another_order_are_noticed(model_dir: Path) -> None:
    device = make(model_dir)
    answer(device, PROMPT, [], 1)
    device.copy([])
    row = StepRow(token_ids=[1], num_computed_tokens=20, block_ids=[1, 0, 2, 3, 4, 5], draw=LIKELIEST)
    assert 0 in device.compute([row]).failures


def test_steps_take_the_time_that_the_model_says(model_dir: Path) -> None:
    clock = Clock()
    device = make(model_dir, clock, simulated_time="h100-8b")
    rows = [StepRow(token_ids=PROMPT, num_computed_tokens=0, block_ids=list(range(16)), draw=LIKELIEST)]
    expected = simulated_time("h100-8b").time.seconds(shape_of(rows))
    meanwhile: list[float] = []
    output = device.end(device.begin(StepInput(number=1, rows=rows)), lambda: meanwhile.append(clock.now))
    assert clock.now - 100.0 == pytest.approx(expected)
    assert output.elapsed_s == expected
    assert meanwhile


def test_a_step_that_begins_before_the_last_one_has_ended_waits_for_it(model_dir: Path) -> None:
    clock = Clock()
    device = make(model_dir, clock)
    blocks = list(range(16))
    first = StepRow(token_ids=PROMPT, num_computed_tokens=0, block_ids=blocks, draw=LIKELIEST)
    second = StepRow(
        token_ids=[0], num_computed_tokens=len(PROMPT), block_ids=blocks, draw=LIKELIEST, first=Drawn(step=1, row=0)
    )
    tickets = [device.begin(StepInput(number=number, rows=[row])) for number, row in enumerate((first, second), 1)]
    drawn = [device.end(ticket).tokens[0] for ticket in tickets]
    assert [each.token_id for each in drawn if each is not None] == answer(make(model_dir), PROMPT, [], 2)
    time = simulated_time("h100-8b").time
    assert clock.now - 100.0 == pytest.approx(time.seconds(shape_of([first])) + time.seconds(shape_of([second])))


def test_an_engine_that_runs_ahead_gives_the_same_answer(model_dir: Path) -> None:
    device = make(model_dir)
    given = EngineSettings(block_size=BLOCK_SIZE, run_ahead=True)
    core = EngineCore(given, device, NoStore(), lambda: 0.0, lambda: None)
    add(core, "a", PROMPT, max_tokens=40)
    assert tokens_of(run(core))["a"] == answer(make(model_dir), PROMPT, [], 40)
    assert_idle(core)


def test_a_row_after_one_that_failed_fails(model_dir: Path) -> None:
    device = make(model_dir)
    answer(device, PROMPT, [], 1)
    device.copy([])
    lost = StepRow(token_ids=[1], num_computed_tokens=20, block_ids=[1, 0, 2, 3, 4, 5], draw=LIKELIEST)
    after = StepRow(
        token_ids=[0], num_computed_tokens=21, block_ids=[1, 0, 2, 3, 4, 5], draw=LIKELIEST, first=Drawn(step=2, row=0)
    )
    other = StepRow(token_ids=PROMPT, num_computed_tokens=0, block_ids=list(range(30, 46)), draw=LIKELIEST)
    steps = [StepInput(number=2, rows=[lost]), StepInput(number=3, rows=[after, other])]
    outputs = [device.end(ticket) for ticket in [device.begin(step) for step in steps]]
    assert [list(output.failures) for output in outputs] == [[0], [0]]
    assert outputs[1].tokens[1] is not None


def one_token(device: SimulatedDevice, asked: Draw) -> int | None:
    (token,) = device.execute([StepRow(token_ids=PROMPT, num_computed_tokens=0, block_ids=list(range(16)), draw=asked)])
    return None if token is None else token.token_id


def test_what_a_request_forbids_is_not_drawn(model_dir: Path) -> None:
    device = make(model_dir)
    free = one_token(device, LIKELIEST)
    assert free is not None
    banned = Draw(index=0, temperature=0.0, edits=LogitEdits(banned_ids=array("q", [free])))
    assert one_token(device, banned) not in (None, free)
    allowed = Draw(index=0, temperature=0.0, edits=LogitEdits(allowed_ids=array("q", [17, 23])))
    assert one_token(device, allowed) in (17, 23)
    words = bytearray(-(-device.info.vocab_size // 32) * 4)
    assert one_token(device, Draw(index=0, temperature=0.0, mask=bytes(words))) is None
    words[31 // 8] |= 1 << 31 % 8
    assert one_token(device, Draw(index=0, temperature=0.0, mask=bytes(words))) == 31


def test_logprobs_scores_and_states(model_dir: Path) -> None:
    device = make(model_dir)
    row = StepRow(
        token_ids=PROMPT,
        num_computed_tokens=0,
        block_ids=list(range(16)),
        draw=Draw(index=0, temperature=0.0, num_top=3),
        score=Scoring(start=0, token_ids=PROMPT[1:], num_top=0),
    )
    output = device.compute([row])
    token = output.tokens[0]
    assert token is not None
    assert [each.token_id for each in token.top_logprobs][:1] == [token.token_id]
    assert len(token.top_logprobs) == 3
    assert [each.token_id for each in output.scores[0]] == PROMPT[1:]
    pooled = StepRow(token_ids=PROMPT, num_computed_tokens=0, block_ids=list(range(16)), num_pooled=5)
    assert len(device.compute([pooled]).pooled[0]) == device.info.hidden_size


def test_recorded_steps_are_replayed(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    device, file = make(model_dir), tmp_path / "steps"
    info = device.info
    header = StepFileHeader(
        spec=info.spec,
        num_blocks=info.num_blocks,
        max_model_len=info.max_model_len,
        device=info.device,
        model=str(model_dir),
        quantization="none",
        kernels="",
        host_cache_gb=0.0,
    )
    answer(device, PROMPT, [], 1)
    recorded = RecordingDevice(device, StepFileWriter(file, header), 2)
    rows = [StepRow(token_ids=[1, 2], num_computed_tokens=20, block_ids=list(range(16)), draw=LIKELIEST)]
    for _ in range(2):
        assert not recorded.compute(rows).failures
    assert main(["replay", str(file)]) == 0
    assert "2 rows of 2 steps: all tokens are equal" in capsys.readouterr().out


@pytest.mark.parametrize("name", SHEETS)
def test_data_sheets(name: str) -> None:
    simulated = simulated_time(name)
    seconds = simulated.time.seconds
    decode = StepShape(num_decodes=1, decode_context=1000, longest_context=1000, num_head_rows=1)
    assert 1e-3 < seconds(decode) < 0.1
    chunk = StepShape(num_chunks=1, chunk_tokens=2048, chunk_pairs=2048 * 2049 // 2, num_head_rows=1)
    assert seconds(chunk) > 2 * seconds(decode)
    assert simulated.kv_tokens > 8192
    assert "not measured" in simulated.source


def test_eight_billion_on_an_h100_is_near_what_is_published() -> None:
    """Some 7 ms a token alone, and 20,000 prompt tokens a second or more."""
    seconds = simulated_time("h100-8b").time.seconds
    alone = seconds(StepShape(num_decodes=1, decode_context=500, longest_context=500, num_head_rows=1))
    assert 0.005 < alone < 0.009
    chunk = StepShape(num_chunks=1, chunk_tokens=8192, chunk_pairs=8192 * 8193 // 2, num_head_rows=1)
    assert 20_000 < 8192 / seconds(chunk) < 60_000


def test_a_measured_model_of_time(model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "time.json"
    file.write_bytes(encode(simulated_time("xeon-135m").time))
    device = make(model_dir, simulated_time=str(file))
    assert device.info.device_reason == f"measured on 2 cores of a Xeon with AMX, by {file}"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"simulated_time": "h200"}, "--simulated-time: h200 is neither a file nor one of h100-8b"),
        ({"simulated_time": __file__}, "is of no use"),
        ({"speculation": "smollm2-135m-instruct"}, "--speculation: a simulated device guesses by none or ngram"),
        ({"quantization": "int8"}, "--quantization: a simulated device has no weights"),
    ],
)
def test_settings_that_make_no_sense(model_dir: Path, settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        make(model_dir, **settings)
    assert words in raised.value.message
