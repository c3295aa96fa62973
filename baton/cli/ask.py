"""Commands that ask a running stack: chat, generate, status, models; and `demo`, which brings its own stack."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import shutil
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import click

from baton.cli.options import AS_JSON, SettingsCommand
from baton.sampling_settings import sampling_options
from baton.settings import CHAT_SETTINGS, DEMO_SETTINGS, GENERATE_SETTINGS
from common.choices import ChoiceOptions
from common.config import ChatSettings, ClientSettings, DemoSettings, GenerateSettings
from common.errors import BatonError, ConfigError, NotFoundError

if TYPE_CHECKING:
    from baton.client.report import FleetWorker, Result
    from baton.client.sync_client import Answer, Client
    from baton.stack.local_stack import Addresses
    from common.finished_request import FinishedRequest
    from common.sampling import SamplingOptions

DEMO_QUESTION = "What is the capital of Japan?"


def connect(settings: ClientSettings) -> Client:
    from baton.client.sync_client import Client

    return Client(
        settings.router,
        timeout=settings.timeout,
        api_key=settings.api_key,
        tls=settings.tls,
        tls_ca=settings.tls_ca,
        tls_cert=settings.tls_cert,
        tls_key=settings.tls_key,
        tls_server_name=settings.tls_server_name,
    )


def sampling(settings: ClientSettings, *, as_json: bool = False) -> SamplingOptions:
    """What was set. Raises `ConfigError` for what would be asked for and not be shown."""
    options = sampling_options(settings)
    for name in ("logprobs", "prompt_logprobs"):
        if name in options and not as_json:
            raise ConfigError("--" + name.replace("_", "-"), "is only shown by `baton generate --json`")
    return options


def choices(settings: GenerateSettings) -> ChoiceOptions:
    """What was set."""
    values = {name: getattr(settings, name) for name in ChoiceOptions.__annotations__}
    return cast("ChoiceOptions", {name: value for name, value in values.items() if value is not None})


# ------------------------------------------------------------------------------------------ chat and generate


def chat(settings: ChatSettings, *, question: tuple[str, ...]) -> int:
    history = [("system", settings.system)] if settings.system else []
    with connect(settings) as client:
        if question:
            answer = client.chat([*history, ("user", " ".join(question))], **sampling(settings))
            stream(answer)
            if settings.timeline:
                print_timeline(answer.result())
            return 0
        return converse(client, settings, history)


def converse(client: Client, settings: ChatSettings, history: list[tuple[str, str]]) -> int:
    """Questions from standard input until its end. Ctrl-C stops an answer, and what was said of it stays said."""
    interactive = sys.stdin.isatty()
    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() editing and a history
        served = ", ".join(model.id for model in client.models())
        print(f"{served}. Ctrl-C stops an answer, Ctrl-D leaves.")
    failed = False
    while True:
        try:
            question = input("> " if interactive else "")
        except EOFError:
            if interactive:
                print()
            return 1 if failed else 0
        except KeyboardInterrupt:
            print()
            continue
        if not question.strip():
            continue
        history.append(("user", question))
        answer = client.chat(history, **sampling(settings))
        try:
            stream(answer)
        except KeyboardInterrupt:
            answer.cancel()
            print()
        except BatonError as error:
            if not interactive:
                raise
            print(f"error: {error.message}", file=sys.stderr)
            failed = True
        else:
            failed = False
            if settings.timeline:
                print_timeline(answer.result())
        if answer.text:
            history.append(("assistant", answer.text))
        else:
            history.pop()


def generate(settings: GenerateSettings, *, prompt: str, as_json: bool) -> int:
    text = sys.stdin.read() if prompt == "-" else prompt
    with connect(settings) as client:
        answer = client.generate(text, **sampling(settings, as_json=as_json), **choices(settings))
        if not as_json and settings.n in (None, 1):
            stream(answer)
        results = answer.results()
    for number, result in enumerate(results, 1):
        title = f"--- {number} of {len(results)} ---" if len(results) > 1 else ""
        if as_json:
            print(json.dumps(dataclasses.asdict(result), ensure_ascii=False))
        elif title:
            print(title if result.cumulative_logprob is None else f"{title} logprob {result.cumulative_logprob:.3f}")
            print(result.text)
        if settings.timeline:
            print_timeline(result, title)
    return 0


def stream(answer: Answer) -> None:
    """Prints an answer as it arrives, and ends its last line."""
    for chunk in answer:
        print(chunk.text, end="", flush=True)
    print(flush=True)


def print_timeline(result: Result, title: str = "") -> None:
    """Prints to standard error, so that standard output holds the answer alone. `title` says which answer it is of."""
    from baton.timeline import render_timeline

    width = min(80, shutil.get_terminal_size().columns)
    ascii_only = not (sys.stderr.encoding or "").lower().startswith("utf")
    picture = render_timeline(result.report, result.usage, result.finish_reason, width=width, ascii_only=ascii_only)
    print(f"\n{title}\n{picture}" if title else f"\n{picture}", file=sys.stderr, flush=True)


# ----------------------------------------------------------------------------------------------------- fleet


def status(settings: ClientSettings, *, as_json: bool, wide: bool) -> int:
    with connect(settings) as client:
        workers = client.fleet()
    if as_json:
        print(json.dumps({"workers": [dataclasses.asdict(worker) for worker in workers]}))
    else:
        print_fleet(workers, wide=wide)
    return 0


def print_fleet(workers: Sequence[FleetWorker], *, wide: bool = False) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("role", "address", "state", "dtype"):
        table.add_column(title, no_wrap=True)
    for title in ("running", "waiting", "blocks", "free", "cached", "leases"):
        table.add_column(title, justify="right")
    for title in ("queued tokens", "known blocks", "hit rate", "tokens/s") if wide else ():
        table.add_column(title, justify="right")
    if wide:
        table.add_column("breaker", no_wrap=True)
        table.add_column("step times", no_wrap=True)
        table.add_column("by slack", no_wrap=True)
    table.add_column("integrity")
    for one in workers:
        counts = [one.num_requests_running, one.num_requests_waiting, one.num_blocks]
        counts += [one.num_free_blocks, one.num_cached_blocks, one.num_leases]
        cells = [one.role_words, one.address, one.state.value, one.dtype, *map(str, counts)]
        if wide:
            cells += [str(one.num_queued_prompt_tokens), str(one.num_known_blocks)]
            cells += [f"{one.hit_rate:.0%}", f"{one.tokens_per_second:.1f}", one.breaker, _step_times(one)]
            cells.append("yes" if one.goes_by_slack else "no")
        table.add_row(*cells, one.integrity)
    width = None if sys.stdout.isatty() else 300  # a pipe has no edge to wrap at
    console = Console(width=width, highlight=False)
    console.print(table)
    reasons = [(one.dtype, one.dtype_reason) for one in workers] + [(one.device, one.device_reason) for one in workers]
    reasons += [(f"kernels {one.kernels}", one.kernels_reason) for one in workers]
    for what, reason in dict.fromkeys(reasons):
        if reason:
            console.print(f"{what}: {reason}", markup=False)


def _step_times(worker: FleetWorker) -> str:
    """Where it knows from how long its steps take, since when, and how good that is."""
    if not worker.time_source or worker.time_source == "none":
        return "not known"
    age = f"{worker.time_age_s / 60:.0f} min" if worker.time_age_s >= 60 else f"{worker.time_age_s:.0f} s"
    error = f", error {worker.time_error_median:.0%}, p90 {worker.time_error_p90:.0%}" if worker.time_error_p90 else ""
    return f"{worker.time_source}, {age}{error}{', drifts' if worker.time_drifts else ''}"


def models(settings: ClientSettings) -> int:
    with connect(settings) as client:
        for model in client.models():
            print(f"{model.id}  {model.max_model_len} tokens")
    return 0


# -------------------------------------------------------------------------------------------------- requests


def trace(settings: ClientSettings, *, request_id: str | None, as_json: bool) -> int:
    """Where the time of a request went that has ended; without an id, the last requests in a table."""
    with connect(settings) as client:
        found = client.requests(request_id=request_id or "")
    if request_id is not None and not found:
        raise NotFoundError(f"request {request_id!r} is none of the last ones that ended")
    if as_json:
        print(json.dumps({"requests": [dataclasses.asdict(one) for one in found]}))
    elif request_id is None:
        print_requests(found)
    else:
        from baton.timeline import render_stages

        width = min(120, shutil.get_terminal_size().columns)
        ascii_only = not (sys.stdout.encoding or "").lower().startswith("utf")
        print("\n\n".join(render_stages(one, width=width, ascii_only=ascii_only) for one in found))
    return 0


def print_requests(found: Sequence[FinishedRequest]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("request", "status"):
        table.add_column(title, no_wrap=True)
    for title in ("prompt", "cached", "tokens", "queue ms", "ttft ms", "total ms", "tokens/s"):
        table.add_column(title, justify="right")
    told = [_targets(one) for one in found]
    for title in ("targets", "prefill", "decode") if any(told) else ("prefill", "decode"):
        table.add_column(title, no_wrap=True)
    for one, targets in zip(found, told, strict=True):
        times = [one.router_queue_ms + one.queue_ms, one.ttft_ms, one.total_ms, one.tokens_per_second]
        cells = [one.request_id, one.status, *map(str, (one.prompt_tokens, one.cached_tokens, one.output_tokens))]
        cells += ["" if number is None else f"{number:.1f}" for number in times]
        cells += [targets] if any(told) else []
        table.add_row(*cells, one.prefill_worker, one.decode_worker)
    Console(width=None if sys.stdout.isatty() else 300, highlight=False, markup=False).print(table)


def _targets(request: FinishedRequest) -> str:
    """What became of its latency targets: met, or which it missed; empty if it had none, or if nobody knows."""
    met = {"ttft": request.ttft_met, "tpot": request.tpot_met}
    if missed := [name for name, is_met in met.items() if is_met is False]:
        return f"missed {', '.join(missed)}"
    return "met" if True in met.values() else ""


# ------------------------------------------------------------------------------------------------------ demo


def demo(settings: DemoSettings, *, question: tuple[str, ...]) -> int:
    """Brings a stack up, asks it one question, prints the answer and where its time went, and ends the stack."""
    from baton.cli.serve import prepare_model
    from baton.stack import local_stack as stack
    from baton.stack import stack_plan
    from baton.stack.kv_directory import kv_directory
    from common.logs import setup_logging

    text = " ".join(question) or DEMO_QUESTION

    def ask(addresses: Addresses) -> int:
        from baton.client.sync_client import Client

        print(f"{len(running.children)} processes: {', '.join(running.commands)}", file=sys.stderr)
        print(f"\n> {text}", flush=True)
        with Client(addresses.grpc, timeout=settings.start_timeout) as client:
            answer = client.chat(text, temperature=0.0, max_tokens=settings.max_tokens)
            stream(answer)
            print_timeline(answer.result())
        return 0 if answer.text.strip() else 1

    setup_logging("demo", level=settings.log_level, log_format=settings.log_format)
    stack_plan.check(settings)
    settings = prepare_model(settings)
    with kv_directory(stack_plan.given_kv_dir(settings)) as kv_dir:
        running = stack_plan.plan(settings, kv_dir)
        return stack.run(running, work=ask)


ASK_COMMANDS = (
    SettingsCommand(
        "chat",
        CHAT_SETTINGS,
        chat,
        about="Asks a running stack; a conversation if no question is given.",
        examples=[
            'baton chat "What is the capital of Japan?"',
            "baton chat --system 'You answer in rhymes.' --temperature 0.7",
            'baton chat --timeline --max-tokens 32 "Why is the sky blue?"',
        ],
        params=[click.Argument(["question"], nargs=-1)],
    ),
    SettingsCommand(
        "generate",
        GENERATE_SETTINGS,
        generate,
        about="Continues a prompt; - reads it from standard input.",
        examples=[
            'baton generate "Once upon a time" --max-tokens 40',
            'baton generate "1, 2, 3," --temperature 0 --json',
            'baton generate "Once upon a time" --n 3 --best-of 5',
            'baton generate "Once upon a time" --n 4 --use-beam-search --max-tokens 20',
        ],
        params=[
            click.Argument(["prompt"]),
            click.Option(["--json", "as_json"], is_flag=True, help="Print a JSON object for each answer, one a line."),
        ],
    ),
    SettingsCommand(
        "status",
        ClientSettings,
        status,
        about="Shows every worker of the fleet.",
        examples=["baton status", "baton status --wide", "baton status --router 10.0.0.5:50051 --json"],
        params=[
            AS_JSON,
            click.Option(
                ["--wide"], is_flag=True, help="queues, hit rates, tokens a second, breakers and step times, too"
            ),
        ],
    ),
    SettingsCommand(
        "trace",
        ClientSettings,
        trace,
        about="Shows where the time of a request went that has ended; without an id, the last requests.",
        examples=["baton trace", "baton trace my-request-7", "baton trace my-request-7 --json"],
        params=[click.Argument(["request_id"], required=False), AS_JSON],
    ),
    SettingsCommand(
        "models", ClientSettings, models, about="Lists the models that are served.", examples=["baton models"]
    ),
    SettingsCommand(
        "demo",
        DEMO_SETTINGS,
        demo,
        about="Starts a stack on free ports, asks one question, shows where its time went, and ends the stack.",
        examples=["baton demo", 'baton demo --prefill 2 "Name three colours."'],
        params=[click.Argument(["question"], nargs=-1)],
    ),
)
