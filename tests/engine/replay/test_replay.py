"""Steps written to a file and computed again: on the same device, on others, and from files that are none."""

from __future__ import annotations

import itertools
import random
from array import array
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from baton.cli.main import main
from common.batch_time import StepShape
from common.config import EngineSettings
from common.errors import StartupError
from common.sampling import SamplingParams
from common.types import SampledToken
from engine import messages as m
from engine.blocks.host_tier import BlockCopy, BlockCopyKind
from engine.core import EngineCore
from engine.local.device import LocalDevice
from engine.local.host_memory import GIB
from engine.replay.recorder import RecordingDevice
from engine.replay.replay import ComparedStep, replay
from engine.replay.step_file import RecordedStep, StepFileHeader, StepFileWriter, read_steps
from engine.sampling.draws import draw
from engine.sampling.logit_changes import LogitChanges
from engine.step import Draw, Drawn, Scoring, StepInput, StepOutput, StepRow
from kv_store.base import ConnectorConfig
from kv_store.memory import MemoryConnector
from tests.engine.kernels.variants import ALL
from tests.engine.tiny_models import BLOCK_SIZE, VOCAB_SIZE, make_model, make_runner
from tests.support.fake_device import tokens_of

NUM_BLOCKS = 200
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "llama", {})


def header_of(device: LocalDevice, model: str = "tiny") -> StepFileHeader:
    info = device.info
    return StepFileHeader(
        spec=info.spec,
        num_blocks=info.num_blocks,
        max_model_len=info.max_model_len,
        device=info.device,
        model=model,
        quantization="none",
        kernels="torch",
        host_cache_gb=device.info.num_host_blocks * info.spec.block_bytes / GIB,
    )


def some_draw(rng: random.Random, row: int) -> Draw:
    """Greedy, drawn, filtered, changed, masked; with and without logprobs."""
    params = (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(seed=row, temperature=0.7),
        SamplingParams(seed=row, top_k=20, top_p=0.8, min_p=0.01, logprobs=0),
        SamplingParams(seed=row, repetition_penalty=1.3, presence_penalty=0.2, frequency_penalty=0.1),
        SamplingParams(temperature=0.0, logit_bias={7: 1.5, 9: -2.0}, min_tokens=4, stop_token_ids=(3,)),
    )[row % 6]
    changes = LogitChanges(params, [5, 6, 7], [2]) if params.changes_logits else None
    mask = rng.randbytes(-(-VOCAB_SIZE // 32) * 4) if row % 4 == 3 else b""
    return draw(params, row % 3, changes, mask)


def mixed_steps() -> list[list[StepRow]]:
    """Prompts of 32 rows, then a step of 32 mixed rows: decodes, chunks, one scored, two pooled, one without a draw."""
    rng = random.Random(5)
    free = rng.sample(range(NUM_BLOCKS), NUM_BLOCKS)
    lengths = [rng.randint(1, 60) for _ in range(32)]
    tables = []
    for length in lengths:
        count = -(-(length + 9) // BLOCK_SIZE)
        tables.append(array("i", free[:count]))
        free = free[count:]

    def tokens(num: int) -> list[int]:
        return [rng.randrange(VOCAB_SIZE) for _ in range(num)]

    prompts = [
        StepRow(token_ids=tokens(length), num_computed_tokens=0, block_ids=table)
        for length, table in zip(lengths, tables, strict=True)
    ]
    mixed = []
    for row, (length, table) in enumerate(zip(lengths, tables, strict=True)):
        num_new = 1 if row < 24 else row % 8 + 2
        asked = replace(
            StepRow(token_ids=tokens(num_new), num_computed_tokens=length, block_ids=table), draw=some_draw(rng, row)
        )
        if row == 27:
            asked = replace(asked, score=Scoring(start=0, token_ids=asked.token_ids[1:], num_top=2))
        if row in (29, 30):
            asked = replace(asked, draw=None, num_pooled=num_new)
        if row == 31:
            asked = replace(asked, draw=None)
        mixed.append(asked)
    return [prompts, mixed]


def record(path: Path, device: LocalDevice, *, skip: int = 0, num_steps: int | None = None) -> list[StepOutput]:
    """What came of the recorded steps; the first `skip` ones are computed before the record begins."""
    steps = mixed_steps()
    for rows in steps[:skip]:
        device.compute(rows)
    recording = RecordingDevice(device, StepFileWriter(path, header_of(device)), num_steps or len(steps) - skip)
    return [recording.compute(rows) for rows in steps[skip:]]


def differences(steps: list[ComparedStep]) -> list[str]:
    return [line for step in steps for line in step.differences]


@pytest.mark.parametrize("skip", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kernels", ALL)
def test_mixed_rows_are_equal_on_every_variant(model_dir: Path, tmp_path: Path, kernels: str, skip: int) -> None:
    """Also if the record begins after the prompts, whose KV is then in the file."""
    path = tmp_path / "steps"
    outputs = record(path, make_runner(model_dir, num_blocks=NUM_BLOCKS, kernels="torch"), skip=skip)
    steps = list(replay(*read_steps(path), make_runner(model_dir, num_blocks=NUM_BLOCKS, kernels=kernels)))
    assert [step.num_rows for step in steps] == [32] * (2 - skip)
    assert differences(steps) == []
    assert all(step.largest < 1e-4 for step in steps)
    assert sum(token is not None for token in outputs[-1].tokens) == 29
    assert len(outputs[-1].scores[27]) == 4
    assert set(outputs[-1].pooled) == {29, 30}
    assert 0 < steps[-1].elapsed_s < 60


def test_what_is_read_is_what_was_written(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "steps"
    device = make_runner(model_dir, num_blocks=NUM_BLOCKS, kernels="torch")
    outputs = record(path, device)
    header, recorded = read_steps(path)
    assert header == header_of(device)
    read = list(recorded)
    assert [one.output for one in read] == outputs
    assert [one.step.rows for one in read] == mixed_steps()
    assert [one.step.number for one in read] == [1, 2]
    assert not any(one.blocks for one in read), "the steps themselves wrote all that they read"


HOST_BLOCKS = 24


def host_settings(model_dir: Path) -> dict[str, object]:
    """Eight blocks on the device, and some in host memory."""
    block_bytes = make_runner(model_dir).info.spec.block_bytes
    gb = (HOST_BLOCKS + 0.5) * block_bytes / GIB
    return {"num_blocks": 8, "host_cache_gb": gb, "kernels": "torch"}


def record_engine(path: Path, device: LocalDevice, **settings: object) -> dict[str, list[int]]:
    """An engine's answers to prompts that do not fit on the device together, and its recorded steps."""
    writer = StepFileWriter(path, header_of(device))
    recording = RecordingDevice(device, writer, 1000)
    checked = EngineSettings(block_size=BLOCK_SIZE, preemption_mode="swap", **settings)  # type: ignore[arg-type]
    connector = MemoryConnector(ConnectorConfig(epoch="1", worker_id="1"))
    core = EngineCore(checked, recording, connector, itertools.count().__next__, lambda: None)
    events = []
    for name, first in (("a", 5), ("b", 6), ("c", 7), ("d", 5), ("e", 6)):
        prompt = [first, *range(8, 8 + 3 * BLOCK_SIZE)]
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        core.handle(m.AddRequest(request_id=name, prompt_token_ids=prompt, sampling_params=params))
        if name != "a":  # the first two together: one of them is swapped out
            while core.step():
                events += core.take_events()
    events += core.take_events()
    core.close()
    writer.close()
    return tokens_of(events)


def test_copies_are_recorded_with_their_steps(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "steps"
    settings = host_settings(model_dir)
    device = make_runner(model_dir, **settings)  # type: ignore[arg-type]
    answers = record_engine(path, device, **settings)
    assert {len(answer) for answer in answers.values()} == {20}
    assert answers["a"] == answers["d"]
    _, recorded = read_steps(path)
    steps = list(recorded)
    copies = [copy for one in steps for copy in one.step.copies]
    assert {copy.kind for copy in copies} == set(BlockCopyKind)
    assert not any(one.blocks for one in steps), "steps and their copies brought all that steps read"

    def replayed() -> list[ComparedStep]:
        again = make_runner(model_dir, **settings)  # type: ignore[arg-type]
        header, ones = read_steps(path)
        return list(replay(header, ones, again))

    assert differences(replayed()) == []
    header, _ = read_steps(path)
    writer = StepFileWriter(path, header)
    for one in steps:
        writer.add(replace(one, step=replace(one.step, copies=())))
    writer.close()
    assert differences(replayed()), "copies decide about what steps read"


def test_copies_from_what_the_file_does_not_have_are_not_recorded(model_dir: Path, tmp_path: Path) -> None:
    """What host memory got from a copy that was no step's comes as the block that it fills."""
    path = tmp_path / "steps"
    settings = host_settings(model_dir)
    device = make_runner(model_dir, **settings)  # type: ignore[arg-type]
    prompt = StepRow(token_ids=list(range(BLOCK_SIZE)), num_computed_tokens=0, block_ids=[0])
    after = StepRow(token_ids=[9], num_computed_tokens=BLOCK_SIZE, block_ids=[3, 4], draw=draw(GREEDY, 0))
    recording = RecordingDevice(device, StepFileWriter(path, header_of(device)), 3)
    outputs = [recording.compute([prompt])]
    recording.copy([BlockCopy(BlockCopyKind.DEMOTE, 0, 2)])
    up = [BlockCopy(BlockCopyKind.DEMOTE, 0, 1), BlockCopy(BlockCopyKind.PROMOTE, 3, 2)]
    step = StepInput(number=recording.next_number(), rows=[after], copies=up)
    outputs.append(recording.end(recording.begin(step)))
    down = [BlockCopy(BlockCopyKind.DEMOTE, 0, 1), BlockCopy(BlockCopyKind.PROMOTE, 3, 1)]
    step = StepInput(number=recording.next_number(), rows=[after], copies=down)
    outputs.append(recording.end(recording.begin(step)))
    header, recorded = read_steps(path)
    steps = list(recorded)
    assert [list(one.step.copies) for one in steps] == [[], [], down]
    assert [set(one.blocks) for one in steps] == [set(), {3}, set()]
    assert outputs[1].tokens == outputs[2].tokens
    assert differences(list(replay(header, steps, make_runner(model_dir, **settings)))) == []  # type: ignore[arg-type]
    with pytest.raises(StartupError, match=r"step 3 copies block 1 of host memory, here are 0: set --host-cache-gb"):
        list(replay(header, steps, make_runner(model_dir, num_blocks=8)))


def test_a_changed_result_and_changed_kv_are_told(model_dir: Path, tmp_path: Path) -> None:
    path, other = tmp_path / "steps", tmp_path / "other"
    device = make_runner(model_dir, num_blocks=NUM_BLOCKS, kernels="torch")
    record(path, device, skip=1)
    header, recorded = read_steps(path)
    (one,) = recorded
    token = one.output.tokens[3]
    assert token is not None
    tokens = [*one.output.tokens]
    tokens[3] = replace(token, token_id=token.token_id ^ 1)
    block_id = one.step.rows[8].block_ids[0]
    data = bytes(len(one.blocks[block_id]))
    for number, changed in enumerate(
        (
            replace(one, output=replace(one.output, tokens=tokens)),
            replace(one, blocks={**one.blocks, block_id: data}),
            replace(one, output=replace(one.output, failures={2: "it is on fire"})),
        )
    ):
        writer = StepFileWriter(other, header)
        writer.add(changed)
        writer.close()
        (step,) = replay(*read_steps(other), device)
        if number == 1:
            assert step.largest > 1e-4 or step.differences
            assert all(line.startswith("row 8") for line in step.differences)
        else:
            row = (3, None, 2)[number]
            assert [line.partition(",")[0].partition(":")[0] for line in step.differences] == [f"row {row}"]


def test_only_so_many_steps_are_recorded(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "steps"
    record(path, make_runner(model_dir, num_blocks=NUM_BLOCKS, kernels="torch"), num_steps=1)
    _, recorded = read_steps(path)
    assert [one.step.number for one in recorded] == [1]


def test_a_token_of_an_earlier_step(model_dir: Path) -> None:
    """A step may name a token that it does not know yet."""
    greedy = draw(SamplingParams(temperature=0.0), 0)
    answers = []
    for by_name in (False, True):
        device = make_runner(model_dir)
        row = StepRow(token_ids=[5, 6, 7], num_computed_tokens=0, block_ids=[0], draw=greedy)
        number = device.next_number()
        output = device.end(device.begin(StepInput(number=number, rows=[row])))
        first = output.tokens[0]
        assert first is not None
        named = {"token_ids": [0], "first": Drawn(number, 0)} if by_name else {"token_ids": [first.token_id]}
        after = StepRow(num_computed_tokens=3, block_ids=[0], draw=greedy, **named)  # type: ignore[arg-type]
        answers.append([first, *device.execute([after])])
    assert answers[0] == answers[1]
    unknown = device.compute([replace(after, first=Drawn(number, 1))])
    assert list(unknown.failures) == [0]


def test_the_shape_of_a_step() -> None:
    rows = [
        StepRow(token_ids=[1], num_computed_tokens=9, block_ids=[], draw=Draw(index=0, temperature=0.0)),
        StepRow(token_ids=[1], num_computed_tokens=19, block_ids=[], draw=Draw(index=0, top_p=0.5, num_top=0)),
        StepRow(token_ids=[1, 2, 3], num_computed_tokens=10, block_ids=[]),
        StepRow(
            token_ids=[1, 2],
            num_computed_tokens=0,
            block_ids=[],
            draw=Draw(index=0, mask=b"1234"),
            score=Scoring(start=0, token_ids=[2], num_top=1),
        ),
    ]
    assert StepInput(number=1, rows=rows).shape == StepShape(
        num_decodes=2,
        decode_context=10 + 20,
        longest_context=20,
        num_chunks=2,
        chunk_tokens=5,
        chunk_past=10,
        chunk_pairs=(11 + 12 + 13) + (1 + 2),
        chunk_squares=9 + 4,
        num_head_rows=4,
        num_drawn=2,
        num_filtered=1,
        num_masked=1,
        num_logprobs=2,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "holds no recorded steps"),
        (lambda data: b"GGUF" + data, "holds no recorded steps"),
        (lambda data: data[:20], "ends before its first step"),
        (lambda data: data.replace(b"\xa6schema\x02", b"\xa6schema\x07"), "has schema 7 of recorded steps"),
        (lambda data: data.replace(b"\xa4rows", b"\xa4rowz"), "is damaged"),
    ],
)
def test_files_that_are_none(model_dir: Path, tmp_path: Path, change: object, message: str) -> None:
    path = tmp_path / "steps"
    device = make_runner(model_dir, num_blocks=NUM_BLOCKS, kernels="torch")
    record(path, device, skip=1)
    path.write_bytes(change(path.read_bytes()))  # type: ignore[operator]
    with pytest.raises(StartupError, match=message):
        list(replay(*read_steps(path), device))


def test_a_record_that_was_cut_off_ends_before(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "steps"
    device = make_runner(model_dir, num_blocks=NUM_BLOCKS, kernels="torch")
    record(path, device)
    path.write_bytes(path.read_bytes()[:-7])
    assert [step.number for step in replay(*read_steps(path), device)] == [1]


def test_steps_of_another_model(model_dir: Path, tmp_path: Path) -> None:
    path = tmp_path / "steps"
    record(path, make_runner(model_dir, num_blocks=NUM_BLOCKS, kernels="torch"))
    other = make_model(tmp_path / "another", {})
    with pytest.raises(StartupError, match="recorded with model_id"):
        list(replay(*read_steps(path), make_runner(other, num_blocks=NUM_BLOCKS)))
    with pytest.raises(StartupError, match=f"name {NUM_BLOCKS} blocks, here are 64"):
        list(replay(*read_steps(path), make_runner(model_dir)))


def test_the_command(model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, other = tmp_path / "steps", tmp_path / "other"
    device = make_runner(model_dir, num_blocks=NUM_BLOCKS, kernels="torch")
    record(path, device)
    header, recorded = read_steps(path)
    one, *_ = recorded
    for file, output in ((path, None), (other, replace(one.output, tokens=[SampledToken(1)] * 32))):
        writer = StepFileWriter(file, replace(header, model=str(model_dir)))
        writer.add(one if output is None else RecordedStep(step=one.step, output=output, blocks=one.blocks))
        writer.close()
    threads = torch.get_num_threads()
    assert main(["replay", str(path), "--num-threads", str(threads)]) == 0
    assert "32 rows of 1 steps: all tokens are equal" in capsys.readouterr().out
    assert main(["replay", str(other), "--num-threads", str(threads)]) == 1
    assert "step 1, row 0, token: recorded 1, here none" in capsys.readouterr().out
    assert main(["replay", str(tmp_path / "none")]) == 1
    assert "cannot be read" in capsys.readouterr().err
