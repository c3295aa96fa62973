"""Guided requests through the engine: every way that a request can go, on a model of random logits."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from common import metrics
from common.config import EngineSettings
from common.guided import Guided
from common.sampling import SamplingParams
from common.types import FinishReason, SampledToken
from engine import grammars as grammars_module
from engine import guide as guide_module
from engine import messages as m
from engine.batch import SampleInput, SequenceInput, StepOutput
from engine.core import EngineCore
from engine.grammars import GrammarCompiler
from engine.guide import Guide, begin_masks, make_masks, mask_logits
from engine.model_runner import ModelRunner
from engine.sampler import sample
from engine.speculation.speculation import Drafter
from kv_store.base import ConnectorConfig
from kv_store.memory import MemoryConnector
from tests.chaos.tiny_model import write_tiny_model
from tests.engine.fakes import BLOCK_SIZE, FakeRunner, assert_idle, next_token, run, tokens_of
from tests.router.tiny_tokenizer import eos_id, tiny_tokenizer, tokenizer_files, vocab_size

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["cat", "dog"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
}
GUIDED = Guided(json_schema=json.dumps(SCHEMA))
PROMPT = list(range(5, 26))


class RandomRunner(FakeRunner):
    """Logits that depend on every byte of KV, and the real sampler; masks are made while the step computes."""

    vocab_size = vocab_size()
    eos_token_ids = [eos_id()]  # noqa: RUF012
    masks: dict[int, Future[torch.Tensor] | None]  # by id of the sequence

    def execute(
        self, sequences: Sequence[SequenceInput], between_layers: Callable[[], None] = lambda: None
    ) -> list[StepOutput]:
        self.masks = {id(one): begin_masks([one.sample]) for one in sequences if one.sample is not None}
        return super().execute(sequences, between_layers)

    def _sample(self, sequence: SequenceInput) -> SampledToken | None:
        if sequence.sample is None:
            return None
        num_tokens = sequence.num_computed_tokens + len(sequence.token_ids)
        seen = [self._slot(sequence, position).tolist() for position in range(num_tokens)]
        assert [position for _, position in seen] == list(range(num_tokens))
        generator = torch.Generator().manual_seed(next_token([int(token) for token, _ in seen]) + num_tokens * 1000)
        logits = torch.randn(1, self.vocab_size, generator=generator)
        masks = self.masks[id(sequence)]
        return sample(logits, [sequence.sample], masks=None if masks is None else masks.result())[0]


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    file = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    file.write_bytes(tokenizer_files()["tokenizer.json"])
    return GrammarCompiler(file, vocab_size(), [eos_id()])


class Engine:
    """A core with grammars, and a way to wait for them."""

    def __init__(
        self,
        compiler: grammars_module.Compiler,
        *,
        num_blocks: int = 64,
        drafter: Drafter | None = None,
        **settings: object,
    ) -> None:
        self.woken = threading.Event()
        self.clock = 0.0
        self.core = EngineCore(
            EngineSettings(block_size=BLOCK_SIZE, **settings),  # type: ignore[arg-type]
            RandomRunner(num_blocks),
            MemoryConnector(ConnectorConfig(epoch="e", worker_id="w")),
            clock=lambda: self.clock,
            wake=self.woken.set,
            compile_grammar=compiler,
            drafter=drafter,
        )

    def add(
        self, request_id: str, *, prompt: Sequence[int] = PROMPT, guided: Guided | None = GUIDED, **fields: object
    ) -> None:
        sampling = {"temperature": 1.0, "seed": 3, "max_tokens": 150, **dict(fields.pop("params", {}))}  # type: ignore[call-overload]
        params = SamplingParams(guided=guided, **sampling)
        self.core.handle(
            m.AddRequest(request_id=request_id, prompt_token_ids=list(prompt), sampling_params=params, **fields)  # type: ignore[arg-type]
        )

    def run(self) -> list[m.Event]:
        """Until every request has ended."""
        events = run(self.core)
        while self.core.has_work:
            assert self.woken.wait(60), "a grammar is not done"
            self.woken.clear()
            events += run(self.core)
        return events

    def answers(self) -> dict[str, list[int]]:
        return tokens_of(self.run())


def counts() -> dict[str, float]:
    samples = [one for one in next(iter(metrics.worker_grammars.collect())).samples if one.name.endswith("_total")]
    return {one.labels["outcome"]: one.value for one in samples}


def counted(before: dict[str, float]) -> dict[str, float]:
    """What came of grammars since then."""
    changes = {outcome: value - before.get(outcome, 0.0) for outcome, value in counts().items()}
    return {outcome: change for outcome, change in changes.items() if change}


def text_of(tokens: Sequence[int]) -> str:
    return tiny_tokenizer().decode(list(tokens))


def check_answer(tokens: Sequence[int]) -> None:
    assert tokens[-1] == eos_id()
    value = json.loads(text_of(tokens))
    assert list(value) == ["name", "kind", "ages"]
    assert len(value["name"]) <= 8
    assert value["kind"] in ("cat", "dog")
    assert all(0 <= age <= 99 for age in value["ages"])


def alone(compiler: GrammarCompiler, seed: int = 3) -> list[int]:
    engine = Engine(compiler)
    engine.add("a", params={"seed": seed})
    return engine.answers()["a"]


def test_the_answer_has_the_form(compiler: GrammarCompiler) -> None:
    for seed in range(5):
        check_answer(alone(compiler, seed))


def test_a_batch_with_others_changes_nothing(compiler: GrammarCompiler) -> None:
    engine = Engine(compiler)
    for seed in range(5):
        engine.add(f"g{seed}", params={"seed": seed})
        engine.add(f"p{seed}", guided=None, prompt=[seed + 5, 6, 7], params={"max_tokens": 20})
        engine.add(f"r{seed}", guided=Guided(regex="[0-9]{3}"), prompt=[8, seed + 9], params={"seed": seed})
    answers = engine.answers()
    for seed in range(5):
        assert answers[f"g{seed}"] == alone(compiler, seed)
        assert len(answers[f"p{seed}"]) <= 20
        assert len(text_of(answers[f"r{seed}"])) == 3
        assert text_of(answers[f"r{seed}"]).isdigit()
    assert_idle(engine.core)


def test_chunks_and_preemption_change_nothing(compiler: GrammarCompiler) -> None:
    engine = Engine(compiler, chunk_size=4, num_blocks=26, enable_prefix_caching=False)
    for seed in range(3):
        engine.add(f"g{seed}", params={"seed": seed})
    events = engine.run()
    assert max(event.num_preemptions for event in events if isinstance(event, m.TokensGenerated)) > 0
    for seed in range(3):
        assert tokens_of(events)[f"g{seed}"] == alone(compiler, seed)


def test_an_answer_goes_on_elsewhere(compiler: GrammarCompiler) -> None:
    whole = alone(compiler)
    for num_sent in (1, len(whole) // 2, len(whole) - 1):
        engine = Engine(compiler)
        engine.add("a", output_token_ids=whole[:num_sent])
        assert engine.answers()["a"] == whole[num_sent:]


def test_tokens_of_another_grammar_end_the_request(compiler: GrammarCompiler) -> None:
    engine = Engine(compiler)
    engine.add("a", output_token_ids=[7, 8, 9])
    engine.add("b", prompt=[9, 9, 9])
    events = engine.run()
    (failed,) = [event for event in events if isinstance(event, m.RequestFailed)]
    assert (failed.request_id, failed.grpc_code) == ("a", "INTERNAL")
    assert "not in its grammar" in failed.reason
    check_answer(tokens_of(events)["b"])
    assert_idle(engine.core)


def test_a_prefills_token_is_in_the_grammar(compiler: GrammarCompiler) -> None:
    engine = Engine(compiler)
    engine.add("p", mode=m.RequestMode.PREFILL)
    answers = engine.answers()
    assert answers["p"] == alone(compiler)[:1]
    engine.core.handle(m.Release("p"))
    assert_idle(engine.core)


def test_greedy_answers_have_the_form_too(compiler: GrammarCompiler) -> None:
    engine = Engine(compiler)
    engine.add("a", params={"temperature": 0.0, "logprobs": 2})
    (*_, last) = [event for event in engine.run() if isinstance(event, m.TokensGenerated)]
    assert last.finish_reason is FinishReason.STOP
    assert last.tokens[0].logprob is not None  # of the model's own distribution, whatever the grammar allows


@pytest.mark.parametrize(
    ("guided", "words"),
    [
        (Guided(regex="[^\\x00-\\U0010FFFF]"), "no text matches"),
        (Guided(regex="("), "unclosed group"),
        (Guided(json_schema='{"uniqueItems": true}'), "uniqueItems"),
        (Guided(structural_tag='{"format": {"type": "token", "token": "<|nowhere|>"}}'), "unknown special token"),
    ],
)
def test_a_bad_grammar_is_the_requests_own_fault(compiler: GrammarCompiler, guided: Guided, words: str) -> None:
    engine = Engine(compiler)
    for request_id in ("a", "b"):  # the second one finds the failure kept
        engine.add(request_id, guided=guided)
        (failed,) = [event for event in engine.run() if isinstance(event, m.RequestFailed)]
        assert (failed.request_id, failed.grpc_code, failed.field) == (
            request_id,
            "INVALID_ARGUMENT",
            "sampling_params.guided",
        )
        assert words in failed.reason
    assert_idle(engine.core)


def test_what_the_form_allows_may_be_banned(compiler: GrammarCompiler) -> None:
    """A stop token that must not come yet, and is all that may come."""
    engine = Engine(compiler)
    digit = tiny_tokenizer().rust.token_to_id("7")
    engine.add("a", guided=Guided(regex="7"), params={"min_tokens": 3, "stop_token_ids": (digit,)})
    (failed,) = [event for event in engine.run() if isinstance(event, m.RequestFailed)]
    assert failed.field == "sampling_params.guided"
    assert "cannot go on" in failed.reason
    assert_idle(engine.core)


class SlowCompiler:
    """Compiles when it is told to."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self.go_on = threading.Event()
        self.num_calls = 0

    def __call__(self, guided: Guided) -> Guide:
        self.num_calls += 1
        assert self.go_on.wait(60)
        return self._compiler(guided)


@pytest.fixture
def slow(compiler: GrammarCompiler) -> Iterator[SlowCompiler]:
    slow = SlowCompiler(compiler)
    yield slow
    slow.go_on.set()


def test_others_run_while_a_grammar_is_compiled_once(slow: SlowCompiler) -> None:
    engine, before = Engine(slow), counts()
    engine.add("a")
    engine.add("b", prompt=[9, 9, 9])
    engine.add("plain", guided=None, params={"max_tokens": 5})
    assert list(tokens_of(run(engine.core))) == ["plain"]
    assert engine.core.load.num_requests_waiting == 2
    assert engine.core.load.num_queued_prompt_tokens == len(PROMPT) + 3
    seconds = metrics.worker_grammar_seconds._value.get()
    engine.clock += 2.0
    slow.go_on.set()
    answers = engine.answers()
    assert set(answers) == {"a", "b"}
    assert metrics.worker_grammar_seconds._value.get() - seconds == pytest.approx(2.0)
    assert slow.num_calls == 1
    assert counted(before) == {"cached": 1, "compiled": 1}


def test_a_request_that_ends_while_it_waits(slow: SlowCompiler) -> None:
    engine = Engine(slow)
    engine.add("a")
    engine.core.handle(m.Release("a"))
    slow.go_on.set()
    assert engine.answers() == {}
    assert_idle(engine.core)


def test_a_grammar_that_takes_too_long(slow: SlowCompiler) -> None:
    engine, before = Engine(slow), counts()
    engine.add("a")
    engine.clock = grammars_module.COMPILE_TIMEOUT_S + 1
    (failed,) = [event for event in run(engine.core) if isinstance(event, m.RequestFailed)]
    assert failed.grpc_code == "INVALID_ARGUMENT"
    assert "longer than 10 s" in failed.reason
    assert counted(before) == {"late": 1}


def test_too_many_grammars(slow: SlowCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "MAX_PENDING", 2)
    engine, before = Engine(slow), counts()
    for index in range(3):
        engine.add(f"r{index}", guided=Guided(regex=f"a{{{index + 1}}}"))
    (failed,) = [event for event in run(engine.core) if isinstance(event, m.RequestFailed)]
    assert (failed.request_id, failed.grpc_code) == ("r2", "RESOURCE_EXHAUSTED")
    assert counted(before) == {"full": 1}


def test_kept_grammars_are_bounded(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammars_module, "MAX_KEPT", 2)
    calls: list[Guided] = []

    def noted(guided: Guided) -> Guide:
        calls.append(guided)
        return compiler(guided)

    engine = Engine(noted)
    for digit in (1, 2, 1, 3, 1, 2):
        engine.add(f"r{len(calls)}-{digit}", guided=Guided(regex=f"{digit}"))
        engine.run()
    assert [guided.regex for guided in calls] == ["1", "2", "3", "2"]


def test_a_compiler_that_breaks_is_our_fault() -> None:
    def broken(guided: Guided) -> Guide:
        raise OSError("no tokenizer")

    engine, before = Engine(broken), counts()
    engine.add("a")
    (failed,) = [event for event in engine.run() if isinstance(event, m.RequestFailed)]
    assert (failed.grpc_code, failed.field) == ("INTERNAL", "")
    assert counted(before) == {"failed": 1}


def test_masks_of_a_vocabulary_that_the_model_cuts_off(compiler: GrammarCompiler, tmp_path: Path) -> None:
    """Models may have fewer logits than their tokenizer has tokens, or more."""
    file = tmp_path / "tokenizer.json"
    file.write_bytes(tokenizer_files()["tokenizer.json"])
    for size in (vocab_size() - 20, vocab_size() + 100):
        guide = GrammarCompiler(file, size, [eos_id()])(Guided(regex="[0-9]"))
        logits = torch.zeros(3, size)
        mask_logits(logits, [1], make_masks([guide]))
        assert bool(torch.isfinite(logits[[0, 2]]).all())
        allowed = torch.isfinite(logits[1]).nonzero().flatten().tolist()
        assert sorted(text_of([token]) for token in allowed) == list("0123456789")


def test_masks_are_made_while_the_model_computes(
    compiler: GrammarCompiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = threading.Event()

    def noted(guides: Sequence[Guide]) -> torch.Tensor:
        masks = make_masks(guides)
        made.set()
        return masks

    def wait() -> None:
        assert made.wait(60), "the masks are made after the forward pass"

    monkeypatch.setattr(guide_module, "make_masks", noted)
    write_tiny_model(tmp_path, num_layers=1, max_len=64)
    settings = EngineSettings(dtype="float32", kernels="torch", num_threads=1, num_blocks=8)
    runner = ModelRunner(tmp_path, settings)
    rows = []
    for number, regex in enumerate(("[0-9]", None, "[a-z]")):
        guide = None if regex is None else compiler(Guided(regex=regex))
        asked = SampleInput(params=SamplingParams(temperature=0.0), num_output_tokens=0, guide=guide)
        tokens = PROMPT[: (12, 8, 1)[number]]  # single tokens are computed first, so masks come in that order too
        rows.append(SequenceInput(token_ids=tokens, num_computed_tokens=0, block_ids=[number], sample=asked))
    first, _, last = runner.execute(rows, wait)
    assert isinstance(first, SampledToken)
    assert isinstance(last, SampledToken)
    assert text_of([first.token_id]).isdigit()
    assert text_of([last.token_id]).isalpha()


def test_a_tokenizer_is_loaded_ahead(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(tokenizer_files()["tokenizer.json"])
    compiler = GrammarCompiler(file, vocab_size(), [eos_id()])
    compiler.load()
    file.unlink()
    compiler(Guided(regex="a"))


def test_a_tokenizer_of_no_use_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds up the whole engine meanwhile, and clients may ask for it with each request."""
    read: list[str] = []

    def refuse(file: str, **_: object) -> None:
        read.append(file)
        raise ValueError("no decoder of a kind that is known")

    monkeypatch.setattr(grammars_module, "LLTokenizer", refuse)
    file = tmp_path / "tokenizer.json"
    file.write_text("{}")
    compiler = GrammarCompiler(file, 10, [1])
    for regex in "ab":
        with pytest.raises(ValueError, match="no decoder of a kind"):
            compiler(Guided(regex=regex))
    assert len(read) == 2  # with the model's number of logits, and with the tokenizer's own


def test_a_model_that_guided_text_cannot_be_had_from_says_so(tmp_path: Path) -> None:
    guided = Guided(regex="a")
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        GrammarCompiler(tmp_path / "tokenizer.json", 10, [1])(guided)
    with pytest.raises(ValueError, match="no token that ends an answer"):
        GrammarCompiler(tmp_path / "tokenizer.json", 10, [])(guided)
