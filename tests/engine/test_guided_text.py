"""Guided requests through the engine: every way that a request can go, on a model of random logits."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer

from common import grammar_trial, metrics
from common.config import EngineSettings
from common.guided import Guided
from common.sampling import SamplingParams, TokenSequence
from common.types import FinishReason, SampledToken
from engine import messages as m
from engine.core import EngineCore
from engine.local.device import LocalDevice
from engine.sampling import grammars as grammars_module
from engine.sampling.draws import draw
from engine.sampling.grammars import GrammarBounds, GrammarCompiler
from engine.sampling.guide import Guide, GuideError, make_masks
from engine.sampling.logit_changes import LogitChanges
from engine.sampling.sampler import join_masks, mask_logits, sample
from engine.speculation.speculation import Drafter
from engine.step import StepRow
from kv_store.base import ConnectorConfig
from kv_store.memory import MemoryConnector
from tests.chaos.tiny_model import write_tiny_model
from tests.common.test_grammar_process import HOSTILE
from tests.integration.schemas import schemas
from tests.router.tiny_tokenizer import eos_id, tiny_tokenizer, tokenizer_files, vocab_size
from tests.support.fake_device import BLOCK_SIZE, FakeDevice, assert_idle, next_token, run, tokens_of
from text.thought import Thought, after_thought

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


class RandomDevice(FakeDevice):
    """Logits that depend on every byte of KV, and the real sampler."""

    vocab_size = vocab_size()
    eos_token_id = eos_id()

    def _draw(self, row: StepRow) -> SampledToken | None:
        if row.draw is None:
            return None
        num_tokens = row.num_computed_tokens + len(row.token_ids)
        seen = [self._slot(row, position).tolist() for position in range(num_tokens)]
        assert [position for _, position in seen] == list(range(num_tokens))
        generator = torch.Generator().manual_seed(next_token([int(token) for token, _ in seen]) + num_tokens * 1000)
        logits = torch.randn(1, self.vocab_size, generator=generator)
        return sample(logits, [row.draw])[0]


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
        bounds: GrammarBounds | None = None,
        **settings: object,
    ) -> None:
        self.woken = threading.Event()
        self.clock = 0.0
        self.core = EngineCore(
            EngineSettings(block_size=BLOCK_SIZE, **settings),  # type: ignore[arg-type]
            RandomDevice(num_blocks),
            MemoryConnector(ConnectorConfig(epoch="e", worker_id="w")),
            clock=lambda: self.clock,
            wake=self.woken.set,
            compile_grammar=compiler,
            grammar_bounds=bounds,
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


def test_reasoning_before_a_form_goes_on_elsewhere(compiler: GrammarCompiler) -> None:
    """Chunks, preemption and another engine in the middle of the reasoning or of the form change nothing."""
    form = {"type": "json_schema", "json_schema": SCHEMA}
    tag = json.dumps({"format": after_thought(Thought("", "e"), form, {})})
    guided, params = Guided(structural_tag=tag), {"max_tokens": 400}

    def answers(engine: Engine, **fields: object) -> dict[str, list[int]]:
        for number in range(3):
            engine.add(f"g{number}", guided=guided, params={**params, "seed": number}, **fields)
        return engine.answers()

    whole = answers(Engine(compiler))
    for tokens in whole.values():
        rest = text_of(tokens).partition("e")[2]
        assert tokens[-1] == eos_id()
        assert list(json.loads(rest)) == ["name", "kind", "ages"]
    assert any(len(text_of(tokens).partition("e")[0]) > 3 for tokens in whole.values())
    assert answers(Engine(compiler, chunk_size=4, num_blocks=26, enable_prefix_caching=False)) == whole
    for num_sent in (1, len(whole["g0"]) // 2, len(whole["g0"]) - 1):
        engine = Engine(compiler)
        engine.add("g0", guided=guided, params={**params, "seed": 0}, output_token_ids=whole["g0"][:num_sent])
        assert engine.answers()["g0"] == whole["g0"][num_sent:]


def test_tokens_of_another_grammar_end_the_request(compiler: GrammarCompiler) -> None:
    engine = Engine(compiler)
    engine.add("a", output_token_ids=[7, 8, 9])
    engine.add("b", prompt=[9, 9, 9])
    events = engine.run()
    (failed,) = [event for event in events if isinstance(event, m.RequestFailed)]
    # No other worker is asked, as after INTERNAL: the same tokens would fail there.
    assert (failed.request_id, failed.grpc_code) == ("a", "INVALID_ARGUMENT")
    assert failed.field == "sampling_params.guided"
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


ALL = tuple(range(40))
EACH = tuple(TokenSequence(token_ids=(token_id,)) for token_id in ALL)


@pytest.mark.parametrize(
    ("params", "name"),
    [
        ({"bad_words_ids": EACH}, "bad_words_ids"),
        ({"bad_words_ids": EACH, "bad_words": ("a",)}, "bad_words"),  # the router made ids of them
        ({"min_tokens": 2, "stop_token_ids": ALL}, "min_tokens"),
    ],
)
def test_all_tokens_may_be_banned(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch, params: dict[str, object], name: str
) -> None:
    monkeypatch.setattr(RandomDevice, "vocab_size", len(ALL))
    engine = Engine(compiler)
    engine.add("a", guided=None, params=params)
    (failed,) = [event for event in engine.run() if isinstance(event, m.RequestFailed)]
    assert (failed.grpc_code, failed.field) == ("INVALID_ARGUMENT", f"sampling_params.{name}")
    assert failed.reason == "the answer cannot go on: every token is banned"
    assert_idle(engine.core)


class SlowCompiler:
    """Compiles when it is told to."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self.go_on = threading.Event()
        self.begun: list[Guided] = []

    @property
    def num_calls(self) -> int:
        return len(self.begun)

    def __call__(self, guided: Guided) -> Guide:
        self.begun.append(guided)
        assert self.go_on.wait(60)
        return self._compiler(guided)


def until(done: Callable[[], object]) -> None:
    """Pytest's own time limit is what fails."""
    while not done():
        time.sleep(0.002)


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


def test_a_grammar_that_waits_too_long_is_not_to_blame(slow: SlowCompiler) -> None:
    engine, before = Engine(slow), counts()
    engine.add("a")
    engine.clock = grammars_module.COMPILE_TIMEOUT_S + 1
    (failed,) = [event for event in run(engine.core) if isinstance(event, m.RequestFailed)]
    assert (failed.grpc_code, failed.field) == ("RESOURCE_EXHAUSTED", "")  # its own costs have narrower bounds
    assert "others' grammars" in failed.reason
    assert counted(before) == {"late": 1}


def test_too_many_grammars(slow: SlowCompiler) -> None:
    engine, before = Engine(slow, bounds=GrammarBounds(max_pending=2)), counts()
    for index in range(3):
        engine.add(f"r{index}", guided=Guided(regex=f"a{{{index + 1}}}"))
    (failed,) = [event for event in run(engine.core) if isinstance(event, m.RequestFailed)]
    assert (failed.request_id, failed.grpc_code) == ("r2", "RESOURCE_EXHAUSTED")
    assert counted(before) == {"full": 1}


def test_one_tenants_grammars_hold_up_no_others(slow: SlowCompiler) -> None:
    engine, before = Engine(slow, bounds=GrammarBounds(max_pending=4)), counts()
    for index in range(4):
        engine.add(f"h{index}", guided=Guided(regex=f"a{{{index + 1}}}"), tenant="hostile")
    until(lambda: slow.begun)
    engine.add("own", guided=Guided(regex="b"), tenant="other")
    engine.add("same", guided=Guided(regex="a{2}"), tenant="other")  # which waits in the hostile tenant's turn, too
    refused = [event for event in run(engine.core) if isinstance(event, m.RequestFailed)]
    assert {(one.request_id, one.grpc_code) for one in refused} == {
        ("h3", "RESOURCE_EXHAUSTED"),
        ("same", "RESOURCE_EXHAUSTED"),
    }
    engine.add("joins", guided=Guided(regex="a{1}"), tenant="other")  # which is being compiled
    slow.go_on.set()
    assert set(engine.answers()) == {"h0", "h1", "h2", "own", "joins"}
    assert [guided.regex for guided in slow.begun] == ["a{1}", "b", "a{2}", "a{3}"]
    assert counted(before) == {"full": 2, "compiled": 4, "cached": 1}


def test_a_grammar_that_two_tenants_wait_for_is_compiled_in_the_first_turn(slow: SlowCompiler) -> None:
    engine, before = Engine(slow), counts()
    for index in range(4):
        engine.add(f"h{index}", guided=Guided(regex=f"a{{{index + 1}}}"), tenant="hostile")
    until(lambda: slow.begun)
    engine.add("same", guided=Guided(regex="a{4}"), tenant="other")
    slow.go_on.set()
    assert set(engine.answers()) == {"h0", "h1", "h2", "h3", "same"}
    assert [guided.regex for guided in slow.begun[:2]] == ["a{1}", "a{4}"]
    assert counted(before).get("full", 0) == 0


def test_kept_grammars_are_bounded(compiler: GrammarCompiler) -> None:
    calls: list[Guided] = []

    def noted(guided: Guided) -> Guide:
        calls.append(guided)
        return compiler(guided)

    engine = Engine(noted, bounds=GrammarBounds(max_kept=2))
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
        mask_logits(logits, [1], join_masks(make_masks([guide])))
        assert bool(torch.isfinite(logits[[0, 2]]).all())
        allowed = torch.isfinite(logits[1]).nonzero().flatten().tolist()
        assert sorted(text_of([token]) for token in allowed) == list("0123456789")


def allowed_by_mask(guide: Guide) -> set[int]:
    bits = np.unpackbits(np.frombuffer(make_masks([guide])[0], np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def test_a_mask_allows_what_its_matcher_takes(compiler: GrammarCompiler) -> None:
    """Of a text that has to come, one spelling."""
    rng = random.Random(1)
    guided = [Guided(json_schema=json.dumps(schema)) for schema in schemas()]
    guided += [Guided(regex="(foo|foobar|[a-z]+ [0-9]{2})"), Guided(choice=("yes", "no", "yes please"))]
    num_forced = num_final = 0
    for one in guided:
        guide, answer = compiler(one), list[int]()
        for _ in range(12):
            allowed = allowed_by_mask(guide.fork())
            asked = {*rng.choices(range(vocab_size()), k=50), *rng.choices(sorted(allowed), k=10)} - {eos_id()}
            taken = {token_id for token_id in asked if guide.matcher.validate_tokens([token_id]) == 1}
            is_final, is_forced = allowed == {eos_id()}, guide.forced() is not None
            assert allowed & asked <= taken
            assert is_forced or taken == allowed & asked
            assert allowed_by_mask(guide) == allowed  # asking changes nothing
            num_forced += is_forced
            num_final += is_final
            answer.append(rng.choice(sorted(allowed)))
            if answer[-1] == eos_id():
                break
            guide.follow(answer, 0)
    assert num_forced > 50
    assert num_final > 10


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_text_that_spells_a_special_token_is_text(compiler: GrammarCompiler, temperature: float) -> None:
    """In its tokens, wherever it has to come; the special token itself would end the answer, or be none of it."""
    special = tiny_tokenizer().rust.id_to_token(eos_id())
    assert special
    for text in (special, f"a{special}b", f"{special}{special}"):
        engine = Engine(compiler)
        engine.add("a", guided=Guided(regex=re.escape(text)), params={"temperature": temperature})
        tokens = engine.answers()["a"]
        assert tokens[-1] == eos_id()
        assert eos_id() not in tokens[:-1]
        assert text_of(tokens[:-1]) == text


@pytest.mark.slow
def test_a_grammar_that_is_too_much_when_it_is_followed(compiler: GrammarCompiler) -> None:
    """Wherever it is followed, so nobody tries again."""
    engine = Engine(compiler)
    first = tiny_tokenizer().rust.token_to_id("a")
    engine.add("a", guided=Guided(regex="(a{1000}){1000}"), output_token_ids=[first])
    (failed,) = [event for event in engine.run() if isinstance(event, m.RequestFailed)]
    assert (failed.grpc_code, failed.field) == ("INVALID_ARGUMENT", "sampling_params.guided")
    assert "costs" in failed.reason
    assert_idle(engine.core)


@pytest.mark.parametrize("num_sent", [0, 1])
def test_a_grammar_that_is_too_much_for_the_parser(compiler: GrammarCompiler, num_sent: int) -> None:
    """After its first token, drawn here or elsewhere."""
    rules = range(900)
    grammar = f"start: {' | '.join(f'r{i}' for i in rules)}\n"
    grammar += "\n".join(f'r{i}: "a" r{i} | "b{i}" | "c{i}"' for i in rules)
    engine = Engine(compiler)
    first = tiny_tokenizer().rust.token_to_id("a")
    engine.add(
        "a", guided=Guided(grammar=grammar), output_token_ids=[first] * num_sent, params={"logit_bias": {first: 100.0}}
    )
    (failed,) = [event for event in engine.run() if isinstance(event, m.RequestFailed)]
    assert (failed.grpc_code, failed.field) == ("INVALID_ARGUMENT", "sampling_params.guided")
    assert "costs too much to follow: more than 2000 ways" in failed.reason
    assert_idle(engine.core)


def test_states_of_a_lexer_are_bounded_at_every_step(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each further letter of `a`, `b` asks for more states, of which a long answer would fill the memory."""
    monkeypatch.setattr("common.guided.MAX_LEXER_STATES", 500)
    guide = compiler(Guided(regex="[ab]*a[ab]{12}"))
    letters = [tiny_tokenizer().rust.token_to_id(letter) for letter in "ab"]
    numbers = random.Random(3)
    with pytest.raises(GuideError, match="too many states"):
        guide.follow(numbers.choices(letters, k=3000), 0)


class CountingMatcher:
    """A matcher that notes how often it was asked for the whole text that has to come."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self.num_searches = 0

    def compute_ff_tokens(self) -> list[int]:
        self.num_searches += 1
        return self._matcher.compute_ff_tokens()

    def __getattr__(self, name: str) -> object:
        return getattr(self._matcher, name)


def counting(guide: Guide) -> tuple[Guide, CountingMatcher]:
    matcher = CountingMatcher(guide.matcher)
    guide.matcher = matcher  # type: ignore[assignment]
    return guide, matcher


def test_text_that_has_to_come_is_found_once(compiler: GrammarCompiler) -> None:
    """Not for each of its tokens: that would take time as the square of its length."""
    text = "0123456789" * 30
    guide, matcher = counting(compiler(Guided(choice=(text,))))
    answer = list[int]()
    while len(text_of(answer)) < len(text):
        fork, of_fork = counting(guide.fork())
        refused = torch.zeros(1, vocab_size())
        params = SamplingParams(temperature=0.0)
        (mask,) = make_masks([guide])
        (token,) = sample(refused, [draw(params, len(answer), mask=mask)])
        assert token is not None
        assert fork.forced() == token.token_id
        assert of_fork.num_searches == (0 if answer else 1)
        answer.append(token.token_id)
        guide.follow(answer, 0)
    assert text_of(answer) == text
    assert len(answer) > 10
    assert matcher.num_searches == 1


def test_another_spelling_of_text_that_has_to_come(compiler: GrammarCompiler) -> None:
    """Tokens that were found are forgotten if others come: shorter ones are in the grammar, too."""
    texts = (text_of([token]) for token in range(vocab_size()))
    word = next(text for text in texts if len(text) > 2 and text.isascii() and text.isalpha())
    guide = compiler(Guided(choice=(word * 3,)))
    answer = [tiny_tokenizer().rust.token_to_id(word[0])]
    assert guide.forced() not in (None, *answer)
    while text_of(answer) != word * 3:
        guide.follow(answer, 0)
        token = guide.forced()
        assert token is not None
        answer.append(token)
        assert (word * 3).startswith(text_of(answer))


def test_a_guide_that_failed_allows_nothing(compiler: GrammarCompiler) -> None:
    tokenizer = LLTokenizer(tiny_tokenizer().rust.to_str(), eos_token=[eos_id()])
    failed = Guide(LLMatcher(tokenizer, "no grammar"), tokenizer)
    assert failed.failure
    assert not any(make_masks([failed])[0])


def test_logprobs_of_guided_rows_are_the_models_own(compiler: GrammarCompiler) -> None:
    five, letter = (tiny_tokenizer().rust.token_to_id(text) for text in "5a")
    logits = torch.zeros(4, vocab_size())
    logits[:, letter], logits[0::2, five] = 1.0, 2.0  # digits are likeliest in rows 0 and 2
    logits[1, five] = 0.5
    inputs = []
    for temperature, is_guided in ((0.0, True), (0.0, True), (1.0, True), (0.0, False)):
        mask = make_masks([compiler(Guided(regex="[0-9]"))])[0] if is_guided else b""
        inputs.append(draw(SamplingParams(temperature=temperature, logprobs=1), 0, mask=mask))
    tokens = sample(logits, inputs)
    assert [token and token.token_id for token in tokens][:2] == [five, five]
    assert tokens[3] is not None
    assert tokens[3].token_id == letter
    for row in (0, 1):  # of the model's own distribution, refused or not
        token = tokens[row]
        assert token is not None
        assert token.logprob == pytest.approx(float(logits[row].log_softmax(-1)[five]))
        assert token.top_logprobs[0].token_id == (five, letter)[row]


@pytest.mark.parametrize("bias", [None, 3.0])
def test_greedy_tokens_are_those_of_whole_masks(compiler: GrammarCompiler, bias: float | None) -> None:
    generator = torch.Generator().manual_seed(4)
    params = SamplingParams(temperature=0.0, logit_bias={} if bias is None else {7: bias, eos_id(): bias})
    guides = [compiler(Guided(json_schema=json.dumps(schema))) for schema in schemas()]
    answers: list[list[int]] = [[] for _ in guides]
    num_refused = num_allowed = 0
    for _ in range(8):
        logits = torch.randn(len(guides), vocab_size(), generator=generator) * 3
        inputs = []
        for guide, answer in zip(guides, answers, strict=True):
            guide.follow(answer, 0)
            changes = None if bias is None else LogitChanges(params)
            inputs.append(draw(params, len(answer), changes, *make_masks([guide])))
        for row, guide in enumerate(guides[::2]):  # what is allowed is often likeliest
            mask = torch.from_numpy(
                np.unpackbits(np.frombuffer(make_masks([guide.fork()])[0], np.uint8), bitorder="little")
            )
            logits[2 * row] += 20 * mask[: vocab_size()]
        whole = logits.clone()
        for token_id, value in params.logit_bias.items():
            whole[:, token_id] += value
        likeliest = whole.argmax(-1).tolist()
        mask_logits(whole, range(len(guides)), join_masks(make_masks([guide.fork() for guide in guides])))
        expected = whole.argmax(-1).tolist()
        assert [token and token.token_id for token in sample(logits, inputs)] == expected
        num_refused += sum(one != other for one, other in zip(likeliest, expected, strict=True))
        num_allowed += sum(one == other for one, other in zip(likeliest, expected, strict=True))
        going = [row for row, token_id in enumerate(expected) if token_id != eos_id()]
        answers = [[*answers[row], expected[row]] for row in going]
        guides = [guides[row] for row in going]
    assert num_refused > 50
    assert num_allowed > 50


@pytest.mark.parametrize("chosen", ["torch", "auto"])
def test_greedy_guided_rows_of_a_model(compiler: GrammarCompiler, tmp_path: Path, chosen: str) -> None:
    """The same alone, with others, and if another row asks for more than the likeliest token."""
    write_tiny_model(tmp_path, num_layers=1, max_len=64)
    settings = EngineSettings(dtype="float32", kernels=chosen, num_threads=1, num_blocks=8)
    runner = LocalDevice(tmp_path, settings)

    def tokens(*regexes: str | None, **other: int) -> list[str]:
        rows = []
        for number, regex in enumerate(regexes):
            guide = None if regex is None else compiler(Guided(regex=regex))
            params = SamplingParams(temperature=0.0, **(other if number == len(regexes) - 1 else {}))
            asked = draw(params, 0, mask=b"" if guide is None else make_masks([guide])[0])
            rows.append(StepRow(token_ids=PROMPT[:12], num_computed_tokens=0, block_ids=[number], draw=asked))
        found = runner.execute(rows)
        assert all(isinstance(one, SampledToken) for one in found)
        return [text_of([one.token_id]) for one in found if isinstance(one, SampledToken)]

    digit, letter, free = tokens("[0-9]", "[a-z]", None)
    assert digit.isdigit()
    assert letter.isalpha()
    assert tokens("[0-9]") == [digit]
    assert tokens(None, "[a-z]", "[0-9]", logprobs=1) == [free, letter, digit]


def test_a_tokenizer_is_loaded_ahead(tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.json"
    file.write_bytes(tokenizer_files()["tokenizer.json"])
    compiler = GrammarCompiler(file, vocab_size(), [eos_id()])
    compiler.load()
    compiler.start()
    compiler(Guided(regex="a"))  # the process that checks it has read the file
    file.unlink()
    compiler(Guided(regex="b"))


def test_a_tokenizer_of_no_use_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds up the whole engine meanwhile, and clients may ask for it with each request."""
    read: list[str] = []

    def refuse(file: str, **_: object) -> None:
        read.append(file)
        raise ValueError("no decoder of a kind that is known")

    monkeypatch.setattr(grammar_trial, "LLTokenizer", refuse)
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


@pytest.mark.parametrize("name", ["const", "chain-items", "multiple", "object-of-itself", "repeated"])
def test_a_hostile_grammar_is_refused_and_others_are_served(compiler: GrammarCompiler, name: str) -> None:
    """Routers may let it pass: one of another version, or none that was asked."""
    guided, words = HOSTILE[name]
    engine = Engine(compiler)
    engine.add("hostile", guided=guided)
    engine.add("good", prompt=[9, 9, 9])
    engine.add("plain", guided=None, params={"max_tokens": 5})
    events = engine.run()
    (failed,) = [event for event in events if isinstance(event, m.RequestFailed)]
    assert (failed.request_id, failed.grpc_code, failed.field) == (
        "hostile",
        "INVALID_ARGUMENT",
        "sampling_params.guided",
    )
    assert re.search(words, failed.reason)
    assert set(tokens_of(events)) == {"good", "plain"}
    assert_idle(engine.core)


def test_a_grammar_that_nobody_waits_for_is_not_begun(slow: SlowCompiler) -> None:
    engine = Engine(slow, bounds=GrammarBounds(num_threads=1))
    engine.add("first")
    engine.add("left", guided=Guided(regex="a"))
    engine.add("stays", guided=Guided(regex="b"))
    engine.core.handle(m.Release("left"))
    slow.go_on.set()
    assert set(engine.answers()) == {"first", "stays"}
    assert slow.num_calls == 2


def test_what_kept_grammars_take_is_bounded(compiler: GrammarCompiler) -> None:
    def large(guided: Guided) -> Guide:
        guide = compiler(guided)
        guide.num_bytes = 100
        return guide

    engine, before = Engine(large, bounds=GrammarBounds(max_kept_bytes=199)), counts()
    for request_id, regex in (("a", "a"), ("b", "a"), ("c", "b"), ("d", "a")):
        engine.add(request_id, guided=Guided(regex=regex))
        engine.answers()
    assert counted(before) == {"compiled": 3, "cached": 1}
