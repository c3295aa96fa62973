"""Traces that others recorded, read into requests; and texts of conversations.

Mooncake's format (Qin et al., FAST 2025): a JSON object a line,
    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}
with milliseconds, tokens, and one id for each 512 tokens of the prompt: equal ids, equal tokens up to there. If they
are of other lengths, Baton writes "runs" in place of hash_ids: [[46, 64], [47, 900]], of an id and a number of tokens.

Azure's (AzurePublicDataset): CSV with the columns TIMESTAMP (a date), ContextTokens, GeneratedTokens.

ShareGPT's: JSON, a list of {"conversations": [{"from": "human", "value": "..."}, {"from": "gpt", "value": "..."}]}.

What is wrong in a file raises `ConfigError` with the place: a request that is left out would change every figure.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from common.errors import ConfigError
from common.traffic.requests import MAX_RUN_ID, Run, TrafficRequest, answer_id

MOONCAKE_BLOCK = 512  # tokens that one hash id stands for


def read_trace(path: Path, *, block_tokens: int = MOONCAKE_BLOCK) -> list[TrafficRequest]:
    """A trace in Mooncake's format or Azure's, told by what its first line looks like; in the order of time, the first
    request at 0."""
    with _opened(path) as file:
        first = file.readline()
    if first.lstrip().startswith("{"):
        return read_mooncake(path, block_tokens=block_tokens)
    return read_azure(path)


def read_mooncake(path: Path, *, block_tokens: int = MOONCAKE_BLOCK) -> list[TrafficRequest]:
    """A prompt without `hash_ids` has nothing in common with others."""
    found: list[TrafficRequest] = []
    num_alone = 0  # that name no blocks: their ids are made up until those of all blocks are known
    with _opened(path) as file:
        for place, line in _lines(path, file):
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ConfigError("trace", f"{place}: not JSON: {error}") from error
            if not isinstance(entry, dict):
                raise ConfigError("trace", f"{place}: not a JSON object")
            at = _number(place, entry, "timestamp") / 1000
            length = _count(place, entry, "input_length")
            hash_ids, own_runs = entry.get("hash_ids"), entry.get("runs")
            if own_runs is not None:
                runs: tuple[Run, ...] = _own_runs(place, own_runs, length)
            elif hash_ids is None:
                num_alone += 1
                runs = ((-num_alone, length),)
            else:
                runs = _runs(place, hash_ids, block_tokens, length)
            found.append(TrafficRequest(at=at, runs=runs, num_output_tokens=_count(place, entry, "output_length")))
    most = max((run_id for one in found for run_id, _ in one.runs), default=0)
    if num_alone:
        found = [
            replace(one, runs=tuple((most - run_id if run_id < 0 else run_id, num) for run_id, num in one.runs))
            for one in found
        ]
    return _from_zero(path, found)


def write_trace(path: Path, requests: Iterable[TrafficRequest]) -> None:
    """For `read_trace`, which gives the same requests but for their sessions. Raises `OSError`."""
    with path.open("w", encoding="utf-8") as file:
        for one in requests:
            entry = {
                "timestamp": 1000 * one.at,
                "input_length": one.num_prompt_tokens,
                "output_length": one.num_output_tokens,
                "runs": one.runs,
            }
            file.write(json.dumps(entry) + "\n")


def read_azure(path: Path) -> list[TrafficRequest]:
    found: list[TrafficRequest] = []
    with _opened(path) as file:
        reader = csv.DictReader(file)
        named = {name.strip().lower(): name for name in reader.fieldnames or ()}
        columns = []
        for name in ("TIMESTAMP", "ContextTokens", "GeneratedTokens"):
            if name.lower() not in named:
                raise ConfigError("trace", f"{path}: neither Mooncake's JSON lines nor Azure's CSV: no column {name}")
            columns.append(named[name.lower()])
        for number, row in enumerate(reader, 1):
            place = f"{path}, line {reader.line_num}"
            at, prompt, answer = (row[column] or "" for column in columns)
            try:
                moment = datetime.fromisoformat(at.strip())
            except ValueError as error:
                raise ConfigError("trace", f"{place}: TIMESTAMP: {error}") from error
            seconds = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()
            runs = ((number, _count_text(place, "ContextTokens", prompt)),)
            answer_tokens = _count_text(place, "GeneratedTokens", answer)
            found.append(TrafficRequest(at=seconds, runs=runs, num_output_tokens=answer_tokens))
    return _from_zero(path, found)


# ---------------------------------------------------------------------------------------------- other sizes and times


def scaled(requests: Iterable[TrafficRequest], *, speed: float = 1.0, lengths: float = 1.0) -> Iterator[TrafficRequest]:
    """`speed` 2 plays the requests in half the time; `lengths` 0.5 halves prompts and answers, one token at least.
    Beginnings that were shared are shared still."""
    for name, value in (("speed", speed), ("lengths", lengths)):
        if not value > 0:
            raise ValueError(f"{name}: must be above 0, not {value}")
    for one in requests:
        runs, output = one.runs, one.num_output_tokens
        if lengths != 1.0:
            runs = tuple((run_id, max(round(num * lengths), 1)) for run_id, num in runs)
            output = max(round(output * lengths), 1)
        yield replace(one, at=one.at / speed, runs=runs, num_output_tokens=output)


def repeated(requests: Sequence[TrafficRequest], num: int) -> Iterator[TrafficRequest]:
    """`num` requests: the trace again and again, each time with prompts of their own. The pause between two times is
    the mean one between two requests."""
    if not requests:
        raise ValueError("requests: a trace without requests")
    length = requests[-1].at * len(requests) / max(len(requests) - 1, 1)
    step = 1 + max((run_id for one in requests for run_id, _ in one.runs), default=0)
    for number in range(num):
        times, index = divmod(number, len(requests))
        one = requests[index]
        if not times:
            yield one
            continue
        if (times + 1) * step > MAX_RUN_ID:
            raise ValueError(f"requests: {number} at most of this trace")
        runs = tuple((run_id + times * step, tokens) for run_id, tokens in one.runs)
        session = f"{one.session}/{times}" if one.session else ""
        yield replace(one, at=one.at + times * length, runs=runs, session=session)


# -------------------------------------------------------------------------------------------------------------- texts


@dataclass(slots=True, frozen=True)
class Turn:
    question: str
    answer: str  # empty if the file ends with the question


def read_conversations(path: Path) -> list[list[Turn]]:
    """Texts in ShareGPT's format, or in OpenAI's (`messages` of a `role` and a `content`): a JSON list, or an object a
    line. What comes before the first question, and what is neither a question nor an answer, is left out; so are
    conversations without a question."""
    with _opened(path) as file:
        text = file.read()
    try:
        if text.lstrip().startswith("["):
            entries = json.loads(text)
        else:
            entries = [json.loads(line) for line in text.splitlines() if line.strip()]
    except ValueError as error:
        raise ConfigError("trace", f"{path}: not JSON: {error}") from error
    found = [turns for number, entry in enumerate(entries) if (turns := _turns(f"{path}, entry {number}", entry))]
    if not found:
        raise ConfigError("trace", f"{path}: no conversations in it")
    return found


_QUESTION, _ANSWER = {"human", "user"}, {"gpt", "assistant", "chatgpt", "bing", "bard"}


def _turns(place: str, entry: object) -> list[Turn]:
    said = None
    if isinstance(entry, dict):
        said = entry.get("conversations", entry.get("messages"))
    if not isinstance(said, list):
        raise ConfigError("trace", f"{place}: neither `conversations` nor `messages`")
    turns: list[Turn] = []
    for one in said:
        who = (one.get("from") or one.get("role")) if isinstance(one, dict) else None
        words = one.get("value", one.get("content")) if isinstance(one, dict) else None
        if not isinstance(who, str) or not isinstance(words, str):
            raise ConfigError("trace", f"{place}: a message without a text, or without who said it")
        if who.lower() in _QUESTION:
            turns.append(Turn(words, ""))
        elif who.lower() in _ANSWER and turns and not turns[-1].answer:
            turns[-1] = replace(turns[-1], answer=words)
    return turns


# ---------------------------------------------------------------------------------------------------------- internals


@contextmanager
def _opened(path: Path) -> Iterator[TextIO]:
    """Errors of reading it are `ConfigError` too."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield file
    except OSError as error:
        raise ConfigError("trace", f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError("trace", f"{path}: not text: {error}") from error
    except csv.Error as error:
        raise ConfigError("trace", f"{path}: not CSV: {error}") from error


def _lines(path: Path, file: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(where it stands, line), without empty ones."""
    for number, line in enumerate(file, 1):
        if line.strip():
            yield f"{path}, line {number}", line


def _runs(place: str, hash_ids: object, size: int, length: int) -> tuple[Run, ...]:
    if not isinstance(hash_ids, list) or len(hash_ids) != -(-length // size):
        raise ConfigError("trace", f"{place}: hash_ids: not one for each {size} of {length} tokens")
    for one in hash_ids:
        if not isinstance(one, int) or not 0 <= one <= MAX_RUN_ID:
            raise ConfigError("trace", f"{place}: hash_ids: {one!r} is not a number from 0 to {MAX_RUN_ID}")
    return tuple((one, min(size, length - size * index)) for index, one in enumerate(hash_ids))


def _own_runs(place: str, runs: object, length: int) -> tuple[Run, ...]:
    if not isinstance(runs, list):
        raise ConfigError("trace", f"{place}: runs: not a list")
    found: list[Run] = []
    for one in runs:
        match one:
            case [int(run_id), int(num)] if 0 <= run_id <= answer_id(MAX_RUN_ID) and num > 0:
                found.append((run_id, num))
            case _:
                raise ConfigError("trace", f"{place}: runs: {one!r} is not an id and a number of tokens")
    if sum(num for _, num in found) != length:
        raise ConfigError("trace", f"{place}: runs: not of {length} tokens")
    return tuple(found)


def _number(place: str, entry: Mapping[str, object], name: str) -> float:
    value = entry.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ConfigError("trace", f"{place}: {name}: not a number but {value!r}")
    return value


def _count(place: str, entry: Mapping[str, object], name: str) -> int:
    """A number of tokens. An answer of none is one token: the request was served."""
    value = _number(place, entry, name)
    if value != int(value) or value < (0 if name == "output_length" else 1):
        raise ConfigError("trace", f"{place}: {name}: not a number of tokens but {value}")
    return max(int(value), 1)


def _count_text(place: str, name: str, text: str) -> int:
    if not text.strip().isdigit() or (name == "ContextTokens" and not int(text)):
        raise ConfigError("trace", f"{place}: {name}: not a number of tokens but {text!r}")
    return max(int(text), 1)


def _from_zero(path: Path, requests: list[TrafficRequest]) -> list[TrafficRequest]:
    if not requests:
        raise ConfigError("trace", f"{path}: no requests in it")
    requests.sort(key=lambda one: one.at)
    start = requests[0].at
    return [replace(one, at=one.at - start) for one in requests]
