"""Flags that the commands of `baton bench` that send a load have in common."""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import click

from bench.serving.backends import BACKENDS, default_url
from bench.serving.endpoint import Target
from bench.serving.load import DATASETS, LoadSettings
from bench.serving.measure import MeasureSettings
from bench.serving.plan import DEFAULT_NUM_PROMPTS
from bench.serving.texts import Texts, texts
from common.errors import ConfigError
from common.goodput import parse_goodput

Command = Callable[..., Any]
ABOVE_0 = click.FloatRange(min=0, min_open=True)
FROM_0 = click.FloatRange(min=0)
FROM_1 = click.IntRange(min=1)


def above_0(ctx: click.Context, param: click.Parameter, value: str) -> float:  # noqa: ARG001
    """The callback of an option that takes a number above 0, or inf."""
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not number > 0:
        raise click.BadParameter(f"{value!r} is no number above 0, and not inf")
    return number


_ENDPOINT = [
    click.option(
        "--backend",
        type=click.Choice([*BACKENDS]),
        default="openai",
        show_default=True,
        help="; ".join(f"{name}: {what}" for name, what in BACKENDS.items()),
    ),
    click.option(
        "--model", metavar="TEXT", default="", help="to ask for; the one that the endpoint lists first if unset"
    ),
    click.option(
        "--api-key",
        metavar="TEXT",
        envvar=["BATON_API_KEY", "OPENAI_API_KEY"],
        default="",
        help="better given as variable  [BATON_API_KEY, OPENAI_API_KEY]",
    ),
    click.option("--tls-ca", metavar="FILE", default="", help="CAs to trust instead of the public ones"),
    click.option("--temperature", type=FROM_0, default=0.0, show_default=True),
    click.option(
        "--ignore-eos/--no-ignore-eos",
        default=None,
        help="answers as long as planned; off for servers that do not know it  [on, but for sharegpt]",
    ),
    click.option("--extra-body", metavar="JSON", default="{}", help="further fields of each request"),
    click.option("--request-timeout", metavar="SECONDS", type=ABOVE_0, help="after which a request has failed"),
]
_DATA = [
    click.option(
        "--dataset-name",
        type=click.Choice([*DATASETS]),
        default="random",
        show_default=True,
        help="; ".join(f"{name}: {one.about}" for name, one in DATASETS.items()),
    ),
    click.option(
        "--dataset-path",
        metavar="FILE",
        type=click.Path(exists=True, dir_okay=False),
        help="what sharegpt, mooncake and azure read",
    ),
    click.option(
        "--num-prompts",
        metavar="INT",
        type=FROM_1,
        help=f"requests, at most  [{DEFAULT_NUM_PROMPTS}; all that are due with --duration]",
    ),
    click.option("--duration", metavar="SECONDS", type=ABOVE_0, help="no request begins later"),
    click.option(
        "--random-input-len", metavar="INT", type=FROM_1, default=1024, show_default=True, help="tokens of a prompt"
    ),
    click.option(
        "--random-output-len", metavar="INT", type=FROM_1, default=128, show_default=True, help="tokens of an answer"
    ),
    click.option(
        "--random-range-ratio",
        metavar="FLOAT",
        type=FROM_0,
        default=0.0,
        show_default=True,
        help="lengths are uniform from 1 - this to 1 + this times as many",
    ),
    click.option(
        "--random-prefix-len",
        metavar="INT",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="tokens that all prompts begin with, before those above",
    ),
    click.option(
        "--output-len", metavar="INT", type=FROM_1, help="tokens of every answer, instead of what the data set says"
    ),
    click.option("--num-turns", metavar="INT", type=FROM_1, help="of a conversation  [4; sharegpt: 1]"),
    click.option(
        "--trace-speed",
        metavar="FLOAT",
        type=ABOVE_0,
        default=1.0,
        show_default=True,
        help="2: twice as fast as it was",
    ),
    click.option(
        "--length-scale",
        metavar="FLOAT",
        type=ABOVE_0,
        default=1.0,
        show_default=True,
        help="of a trace: 0.1 makes prompts and answers a tenth as long",
    ),
    click.option(
        "--think-time",
        metavar="SECONDS",
        type=FROM_0,
        default=0.0,
        show_default=True,
        help="mean wait of a user between an answer and the next turn (exponential)",
    ),
    click.option(
        "--tokenizer",
        metavar="PATH",
        help="folder of the model: prompts of exact lengths; common words stand in without",
    ),
]
_ARRIVALS = [
    click.option(
        "--burstiness",
        metavar="FLOAT",
        callback=above_0,
        default="1",
        show_default=True,
        help="shape of the Gamma distribution of gaps between requests: 1 Poisson, less in clusters, inf even",
    ),
    click.option(
        "--burst-size",
        metavar="INT",
        type=FROM_1,
        default=1,
        show_default=True,
        help="requests that come at the same moment",
    ),
]
_MEASURE = [
    click.option(
        "--num-warmups",
        metavar="INT",
        type=click.IntRange(min=0),
        default=0,
        show_default=True,
        help="requests before the run",
    ),
    click.option(
        "--warmup-seconds",
        metavar="SECONDS",
        type=FROM_0,
        default=0.0,
        show_default=True,
        help="of the run: what is due in them is told apart",
    ),
    click.option(
        "--repeats",
        metavar="INT",
        type=FROM_1,
        default=1,
        show_default=True,
        help="of the run, each with a seed of its own; figures become means with 95 % intervals",
    ),
    click.option(
        "--goodput", metavar="NAME:MS …", multiple=True, help="targets of a good request: ttft:500 tpot:50 e2el:5000"
    ),
    click.argument("more_targets", nargs=-1, metavar=""),
    click.option(
        "--cancel-fraction",
        metavar="FLOAT",
        type=click.FloatRange(min=0, max=1),
        default=0.0,
        show_default=True,
        help="share of requests that the client gives up",
    ),
    click.option(
        "--cancel-after", metavar="SECONDS", type=ABOVE_0, default=1.0, show_default=True, help="when it does"
    ),
    click.option(
        "--max-send-lag",
        metavar="MS",
        type=ABOVE_0,
        help="a run is invalid if the client was later in the 99th percentile  [10, or a tenth of the median TTFT]",
    ),
    click.option("--seed", metavar="INT", type=int, default=0, show_default=True, help="of lengths and arrivals"),
    click.option(
        "--same-prompts",
        is_flag=True,
        help="words of prompts are those of the seed, too; without, they are new in each run, so that no prefix cache "
        "has them from the last one",
    ),
]
OUTPUT = click.option(
    "--output",
    "-o",
    metavar="FILE",
    multiple=True,
    help="write FILE.json, FILE.csv or FILE.html; may be given several times",
)
AS_JSON = click.option("--json", "as_json", is_flag=True, help="print one JSON object")


def load_options(command: Command) -> Command:
    """All that `read_options` takes, but rates, concurrency and URLs."""
    for option in reversed([*_ENDPOINT, *_DATA, *_ARRIVALS, *_MEASURE]):
        command = option(command)
    return command


@dataclass(slots=True, frozen=True, kw_only=True)
class Options:
    """What the flags say, without which endpoint is asked."""

    settings: MeasureSettings
    texts: Texts
    tokenizer: str | None
    target: Target  # without name and URL


def read_options(given: dict[str, Any]) -> Options:
    """Raises `ConfigError`."""
    known = {one.name for one in fields(LoadSettings)}
    load = LoadSettings(**{name: value for name, value in given.items() if name in known})
    load.check()
    try:
        extra = json.loads(given["extra_body"])
    except ValueError as error:
        raise ConfigError("--extra-body", f"is no JSON: {error}") from error
    if not isinstance(extra, dict):
        raise ConfigError("--extra-body", "is no JSON object")
    ignores_eos = given["ignore_eos"]
    if ignores_eos is None:
        ignores_eos = load.dataset_name != "sharegpt"
    options = {"temperature": given["temperature"], **({"ignore_eos": True} if ignores_eos else {}), **extra}
    lag_ms = given["max_send_lag"]
    settings = MeasureSettings(
        load=load,
        targets=parse_goodput([*given["goodput"], *given["more_targets"]], "--goodput"),
        num_warmups=given["num_warmups"],
        warmup_seconds=given["warmup_seconds"],
        repeats=given["repeats"],
        request_timeout=given["request_timeout"],
        max_send_lag_s=None if lag_ms is None else lag_ms / 1000,
    )
    target = Target(
        name="",
        backend=given["backend"],
        url="",
        api_key=given["api_key"],
        model=given["model"],
        tls_ca=given["tls_ca"],
        options=options,
    )
    words = texts(given["tokenizer"])
    if not given["same_prompts"]:
        words = words.salted(secrets.token_hex(8))
    return Options(settings=settings, texts=words, tokenizer=given["tokenizer"], target=target)


def url_of(given: str | None, backend: str) -> str:
    return given or default_url(backend)
