"""Makes engine/models/verified.py and the tables of docs/models.md: which decoders of transformers Baton serves.

    python -m tools.verified_models --write            compares all
    python -m tools.verified_models olmo2 bloom        says whether these are listed as they are now

Of each model type a small random model is built. Whole prompts, chunks and single tokens have to give transformers'
logits, and a greedy answer transformers' tokens.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging as transformers_logging

from common.config import EngineSettings
from common.errors import StartupError
from common.sampling import SamplingParams
from common.types import SampledToken
from engine.local.device import LocalDevice
from engine.models import registry
from engine.models.adapted_attention import ADAPTED
from engine.models.attention_interface import UnsupportedAttentionError, check_layer_types
from engine.models.families import FAMILIES
from engine.models.text_part import COMPOSITES
from engine.models.verified import COMPARED_WITH, REFUSED, VERIFIED
from engine.sampling.draws import draw
from engine.step import StepRow
from tools.small_models import VARIATIONS, VOCAB_SIZE, UnbuildableError, build, one_line, save, small_config

ROOT = Path(__file__).parents[1]
CODE = ROOT / "engine" / "models" / "verified.py"
DOCS = ROOT / "docs" / "models.md"
NUM_TOKENS = 60
NUM_ANSWER_TOKENS = 16
BLOCK_IDS = [9, 3, 11, 5, 14]  # of the sequence that is compared
TOLERANCE = 2e-3  # of float32 logprobs, which spread over tens
TIMEOUT_S = 90

# Of types whose small config does not show it.
REASONS: dict[str, str] = {
    "gemma4_assistant": "it attends to the KV of another model",
    "gemma4_unified_assistant": "it attends to the KV of another model",
    "lfm2": "layers of type conv in the published checkpoints",
    "lfm2_moe": "layers of type conv in the published checkpoints",
    "minimax_m3_vl_text": "layers of type minimax_m3_sparse in the published checkpoints",
}

# Types that are served, but not as their best known checkpoints are published.
PUBLISHED: dict[str, str] = {
    "deepseek_v3": "in fp8",
    "mimo_v2_flash": "in fp8",
    "minimax_m2": "in fp8",
}


def candidates() -> dict[str, str]:
    """Architectures by model type, but for those that Baton's own decoder computes."""
    return {
        model_type: name
        for model_type, name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())
        if isinstance(name, str)
        and name not in FAMILIES
        and name not in COMPOSITES
        and model_type in CONFIG_MAPPING
        # Else checkpoints name another type.
        and CONFIG_MAPPING[model_type].model_type == model_type
    }


def other_names() -> dict[str, str]:
    """Model types that are other names of an architecture which is compared, or which Baton's own decoder computes."""
    found = {}
    for model_type, name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()):
        if not isinstance(name, str) or name in COMPOSITES or model_type not in CONFIG_MAPPING:
            continue
        config = CONFIG_MAPPING[model_type]
        if config.model_type != model_type or (
            name in FAMILIES and MODEL_FOR_CAUSAL_LM_MAPPING[config].config_class is not config
        ):
            found[model_type] = name
    return found


class RefusedError(Exception):
    """Why a model cannot be served."""


class DifferentError(RefusedError):
    """It computes, and something else."""


def examine(model_type: str, folder: Path) -> str:
    """Why this type is refused; empty if whole prompts, chunks and single tokens give what transformers gives."""
    reason = _examine(model_type, folder)
    if not reason or reason.startswith("it is made of") or not _is_pair(model_type):
        return reason
    return f"its checkpoints are of an encoder and a decoder; {reason}"


def _examine(model_type: str, folder: Path) -> str:
    if reason := REASONS.get(model_type, ""):
        return reason
    for number, variation in enumerate(VARIATIONS):
        try:
            with _time_limit():
                compare(model_type, folder / str(number), variation)
        except UnbuildableError as error:
            reason = reason or _why_none_is_small(model_type) or f"not compared: {error}"
            continue
        except DifferentError as error:
            return _why_different(model_type, folder / "whole", variation) or str(error)
        except RefusedError as error:
            return str(error)
        except Exception as error:
            return f"it does not compute on a paged cache: {one_line(error)}"
        return ""
    return reason


def _why_different(model_type: str, folder: Path, variation: Mapping[str, object]) -> str:
    try:
        compare(model_type, folder, {**variation, "sliding_window": None})
    except (UnbuildableError, RefusedError):
        return ""
    return "windows that its attention does not tell"


def _is_pair(model_type: str) -> bool:
    try:
        return bool(CONFIG_MAPPING[model_type]().is_encoder_decoder)
    except Exception:  # some have no default
        return False


def _why_none_is_small(model_type: str) -> str:
    if parts := ", ".join(sorted(CONFIG_MAPPING[model_type].sub_configs_defaults)):
        return f"it is made of several models: {parts}"
    return "" if _has_interface(model_type) else "its code has no attention interface"


def _has_interface(model_type: str) -> bool:
    """If its code asks transformers' attention interface for attention, or is made to, whatever its flags say."""
    if model_type in ADAPTED:
        return True
    code = inspect.getmodule(MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[model_type]])
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in inspect.getsource(code)


def compare(model_type: str, folder: Path, variation: Mapping[str, object]) -> None:
    """Writes a small model to `folder`. Raises `UnbuildableError`, or `RefusedError` if Baton does not compute it."""
    config = small_config(model_type, variation)
    try:
        check_layer_types(config)
    except UnsupportedAttentionError as error:
        raise RefusedError(str(error)) from error
    reference = build(config)
    # Those with types of layers may have layers of attention alone, else they were refused before.
    if getattr(reference, "_is_stateful", False) and not getattr(config, "layer_types", None):
        raise RefusedError("it keeps a state beside KV")
    if not _has_interface(model_type):
        raise RefusedError("its code has no attention interface")
    save(reference, folder)
    generator = torch.Generator().manual_seed(7)
    token_ids = torch.randint(3, VOCAB_SIZE, (NUM_TOKENS,), generator=generator).tolist()
    expected = _expected(folder, token_ids)
    with (
        mock.patch.object(registry, "VERIFIED", {model_type: MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]}),
        mock.patch.object(registry, "REFUSED", {}),
    ):
        for sizes in ((NUM_TOKENS,), (23, 17, 1, 1, 9, 1, 7, 1)):
            runner = _runner(folder)
            _check(runner, token_ids, sizes, expected)
        answer = _greedy(runner, token_ids)
    _check_answer(answer, _expected(folder, token_ids + answer))


def _runner(folder: Path) -> LocalDevice:
    """Its cache holds NaN, so that reading a slot that was never written shows."""
    sizes = {"block_size": 16, "num_blocks": 64, "num_threads": 1}
    settings = EngineSettings.model_validate({"device": "cpu", "dtype": "float32", **sizes})
    try:
        runner = LocalDevice(folder, settings)
    except StartupError as error:
        reason = error.message.removeprefix(f"model {folder}: ").removesuffix(", which is not supported")
        raise RefusedError(re.sub(r"^model type \S+ (has )?", "", reason)) from error
    runner.kv_cache.fill_(float("nan"))
    return runner


def _check(runner: LocalDevice, token_ids: list[int], sizes: Sequence[int], expected: torch.Tensor) -> None:
    """Steps of `sizes` tokens, with another sequence of another length in each."""
    others = token_ids[5:45]
    start = start_of_others = 0
    for size in sizes:
        end, end_of_others = start + size, min(start_of_others + min(size, 3), len(others))
        step = [
            _input(token_ids, start, end, BLOCK_IDS),
            _input(others, start_of_others, end_of_others, [20, 21, 22]),
        ]
        logprobs = _logprobs(runner.execute(step)[0])
        difference = (logprobs - expected[end - 1]).abs().max().item()
        if not difference < TOLERANCE:
            raise DifferentError(f"results differ from those of transformers (by {difference:.1g})")
        if logprobs.argmax() != expected[end - 1].argmax():
            raise DifferentError("another token than that of transformers")
        start, start_of_others = end, end_of_others


def _greedy(runner: LocalDevice, token_ids: list[int]) -> list[int]:
    """The answer to a prompt whose KV is there, token by token. Computes the prompt's last token again."""
    ids = list(token_ids)
    for _ in range(NUM_ANSWER_TOKENS):
        (output,) = runner.execute([_input(ids, len(ids) - 1, len(ids), BLOCK_IDS)])
        if output is None:
            raise DifferentError("no token")
        ids.append(output.token_id)
    return ids[len(token_ids) :]


def _check_answer(answer: list[int], expected: torch.Tensor) -> None:
    """`expected`: logprobs of transformers for the prompt and the answer. Tokens that are equally likely may come in
    either order."""
    for position, token_id in enumerate(answer, NUM_TOKENS - 1):
        if not expected[position].max() - expected[position, token_id] < TOLERANCE:
            raise DifferentError(
                f"another token than that of transformers, {position - NUM_TOKENS + 1} after the first"
            )


def _input(token_ids: list[int], start: int, end: int, blocks: list[int]) -> StepRow:
    sample = draw(params=SamplingParams(temperature=0.0, logprobs=VOCAB_SIZE), num_output_tokens=0)
    return StepRow(token_ids=token_ids[start:end], num_computed_tokens=start, block_ids=blocks, draw=sample)


def _logprobs(output: SampledToken | None) -> torch.Tensor:
    if output is None:
        raise DifferentError("no token")
    row = torch.full((VOCAB_SIZE,), float("nan"))
    for entry in output.top_logprobs:
        row[entry.token_id] = entry.logprob
    return row


def _expected(folder: Path, token_ids: list[int]) -> torch.Tensor:
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor([token_ids]), use_cache=False).logits[0]
    except Exception as error:
        raise UnbuildableError(f"transformers itself does not compute it: {one_line(error)}") from error
    if logits.shape[-1] != VOCAB_SIZE or not logits.isfinite().all():
        raise UnbuildableError("its logits are of no use")
    return logits.float().log_softmax(-1)


@contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise UnbuildableError(f"no result within {TIMEOUT_S} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(TIMEOUT_S)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def code(results: Mapping[str, str], names: Mapping[str, str]) -> str:
    """engine/models/verified.py."""
    verified = "".join(f"    {_quoted(each)}: {_quoted(names[each])},\n" for each in results if not results[each])
    refused = "".join(f"    {_quoted(each)}: {_quoted(reason)},\n" for each, reason in results.items() if reason)
    head = CODE.read_text().split("COMPARED_WITH")[0]
    return (
        f'{head}COMPARED_WITH = "{transformers.__version__}"  # of transformers\n\n'
        f"# Architectures by model type.\nVERIFIED: dict[str, str] = {{\n{verified}}}\n\n"
        f"# Why not, by model type.\nREFUSED: dict[str, str] = {{\n{refused}}}\n"
    )


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def docs(results: Mapping[str, str], names: Mapping[str, str]) -> str:
    """docs/models.md, with its tables anew."""
    start, end = "<!-- survey: begin -->\n", "<!-- survey: end -->"
    before, _, rest = DOCS.read_text().partition(start)
    _, _, after = rest.partition(end)
    good = [each for each, reason in results.items() if not reason]
    table = f"With transformers {transformers.__version__}, {len(good)} are served:\n\n"
    table += "| architecture | model type |\n| --- | --- |\n"
    table += "".join(f"| `{names[each]}` | {each} |\n" for each in good)
    others = ", ".join(f"`{each}` of `{name}`" for each, name in other_names().items())
    table += f"\nOther names of model types that are served: {others}.\n"
    published = ", ".join(f"{each} ({how})" for each, how in PUBLISHED.items() if each in good)
    table += f"\nCheckpoints that are refused although their type is served, as they are published: {published}.\n"
    table += f"\n{len(results) - len(good)} are refused:\n\n| model type | why |\n| --- | --- |\n"
    table += "".join(f"| {each} | {reason.replace('|', '/')} |\n" for each, reason in results.items() if reason)
    return before + start + table + end + after


def main() -> int:
    names = candidates()
    parser = argparse.ArgumentParser(prog="python -m tools.verified_models", description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the files; without, say whether they are current")
    parser.add_argument("model_types", nargs="*", metavar="MODEL_TYPE", help="compare these only")
    args = parser.parse_args()
    if unknown := sorted(set(args.model_types) - names.keys()):
        parser.error(f"MODEL_TYPE: {', '.join(unknown)}: not a decoder that runs on transformers' code")
    if args.model_types and transformers.__version__ != COMPARED_WITH:
        parser.error(f"MODEL_TYPE: the lists are those of transformers {COMPARED_WITH}, so compare all")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    results = {**dict.fromkeys(VERIFIED, ""), **REFUSED} if args.model_types else {}
    for model_type in args.model_types or names:
        with tempfile.TemporaryDirectory() as folder:
            results[model_type] = examine(model_type, Path(folder))
        print(f"{model_type}: {results[model_type] or 'equal'}", flush=True)
    results = dict(sorted(results.items()))
    texts = {CODE: code(results, names), DOCS: docs(results, names)}
    if args.write:
        for path, text in texts.items():
            path.write_text(text)
    return 0 if all(path.read_text() == text for path, text in texts.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
