"""Serves the traffic really, with found settings: by `baton up` on this machine and `baton bench serve` beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from baton.settings import UP_SETTINGS, load
from baton.stack import local_stack, stack_plan
from baton.stack.kv_directory import kv_directory
from baton.stack.local_stack import Addresses
from baton.tune.files import UP, router_targets, settings_files
from baton.tune.knobs import Config
from baton.tune.trials import Trials, score_of
from baton.tune.tuning import Confirmed
from common.batch_time_file import decode
from common.config import TuneSettings, UpSettings
from common.cpu import read_cpu
from common.errors import BatonError, ConfigError, StartupError
from common.traffic.requests import TrafficRequest
from common.traffic.traces import write_trace
from engine.loading.embedded_model import find_model
from engine.local.device_choice import SIMULATED
from engine.simulated.data_sheet import SHEETS

SPARE_TOKENS = 64  # of the context: a text may have some more tokens than were planned
TOLD = (
    *("completed", "failed", "refused", "request_goodput"),
    *("median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms"),
)


def check(settings: TuneSettings) -> None:
    """Raises `ConfigError` for what cannot be confirmed: better said before the search."""
    if settings.prefill_times or settings.decode_times:
        raise ConfigError("confirm", "all workers of `baton up` are of one kind: --prefill-times cannot be confirmed")


class Confirmation:
    """Gets settings and a load, and serves the traffic so."""

    def __init__(self, settings: TuneSettings, prepare: Callable[[UpSettings], UpSettings]) -> None:
        """`prepare`: makes sure that the model is on disk, and decides device and dtype."""
        self._settings = settings
        self._prepare = prepare

    def __call__(self, trials: Trials, config: Config, at_load: float) -> Confirmed:
        """A run that fails is told as such: what was found before is not lost. Ctrl-C ends it as
        `KeyboardInterrupt`."""
        num_workers = sum(trials.space.roles(config).num_workers.values())
        why_simulated = reason_to_simulate(self._settings, num_workers)
        how = (
            f"simulated devices, since {why_simulated}" if why_simulated else f"{self._settings.model} on this machine"
        )
        requests = served(trials, at_load)
        outcome = trials.outcome(config, requests)
        expected = score_of(outcome.requests, trials.goodput).good_share
        try:
            figures = self._run(trials, config, requests, is_simulated=bool(why_simulated))
        except BatonError as error:
            return Confirmed(None, expected, how, problem=error.message)
        share, reasons = figures.get("good_request_fraction"), figures.get("invalid_reasons")
        return Confirmed(
            float(share) if isinstance(share, int | float) else None,
            expected,
            how,
            figures={name: float(value) for name in TOLD if isinstance(value := figures.get(name), int | float)},
            problem="; ".join(map(str, reasons)) if isinstance(reasons, list) else "",
        )

    def _run(
        self, trials: Trials, config: Config, requests: list[TrafficRequest], *, is_simulated: bool
    ) -> dict[str, object]:
        """Figures of `baton bench serve`. Raises `BatonError`."""
        with tempfile.TemporaryDirectory(prefix="baton-tune-") as name:
            folder = Path(name)
            trace = folder / "traffic.jsonl"
            write_trace(trace, requests)
            (folder / UP).write_text(settings_files(trials, config, "")[UP], encoding="utf-8")
            flags = stack_flags(self._settings, requests, is_simulated=is_simulated)
            settings = self._prepare(load(UP_SETTINGS, flags, config=str(folder / UP)))
            targets = {f"BATON_{name.upper()}": f"{ms:g}" for name, ms in router_targets(trials, config).items()}
            model = find_model(settings.model, settings.cache_dir)
            return _figures(settings, targets, load_command(trials, trace, len(requests), model))


def reason_to_simulate(settings: TuneSettings, num_workers: int) -> str:
    """Why the times of steps are not those of workers on this machine; empty if they are."""
    if settings.times in SHEETS:
        return f"{settings.times} is no measurement of this machine"
    key = decode(Path(settings.times).read_bytes()).key
    if key.device != "cpu":
        return f"{settings.times} was measured on {key.processor}, which workers of one machine would share"
    if key.processor != read_cpu().name:
        return f"{settings.times} was measured on {key.processor}"
    num_cores = len(stack_plan.usable_cores())
    if num_workers * key.num_threads > num_cores:
        return f"{num_workers} workers of {key.num_threads} threads each are more than {num_cores} cores"
    return ""


def served(trials: Trials, at_load: float) -> list[TrafficRequest]:
    """The requests of a real run."""
    requests = trials.requests(is_check=True, load=at_load)
    return [one for one in requests if one.at <= trials.settings.confirm_seconds]


def stack_flags(settings: TuneSettings, requests: Sequence[TrafficRequest], *, is_simulated: bool) -> dict[str, object]:
    """What a stack is told beside the settings that were found."""
    flags: dict[str, object] = {
        "model": settings.model,
        "cache_dir": settings.cache_dir,
        "http_port": 0,
        "grpc_port": 0,
        "log_level": "warning",
        "max_restarts": 0,
    }
    if is_simulated:
        longest = max(one.num_prompt_tokens + one.num_output_tokens for one in requests)
        flags |= {"device": SIMULATED, "simulated_time": settings.times, "max_model_len": longest + SPARE_TOKENS}
    return flags


def load_command(trials: Trials, trace: Path, num_requests: int, model: Path | None) -> list[str]:
    """Without the address. `model`: its folder, whose tokenizer makes prompts as long as they should be."""
    goodput = [f"--goodput={name}:{ms:g}" for name, ms in trials.goodput.items()]
    has_tokenizer = model is not None and (model / "tokenizer.json").is_file()
    tokenizer = [f"--tokenizer={model}"] if has_tokenizer else []
    return [
        *(sys.executable, "-m", "baton", "bench", "serve", "--backend=baton", "--json"),
        *("--dataset-name=mooncake", f"--dataset-path={trace}", f"--num-prompts={num_requests}"),
        *(f"--seed={trials.settings.seed}", *goodput, *tokenizer),
    ]


def _figures(settings: UpSettings, variables: Mapping[str, str], command: Sequence[str]) -> dict[str, object]:
    """Of `baton bench serve`, on a stack that is started and ended. Raises `BatonError`."""
    asking: list[subprocess.Popen[str]] = []
    printed = ""

    def ask(addresses: Addresses) -> int:
        nonlocal printed
        process = subprocess.Popen(  # noqa: S603 (our own command)
            [*command, f"--base-url={addresses.grpc}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        asking.append(process)
        printed, told = process.communicate()
        if not printed.strip():
            raise StartupError(f"baton bench serve ended with exit code {process.returncode}: {told.strip()}")
        return 0

    stack_plan.check(settings)
    try:
        with kv_directory(stack_plan.given_kv_dir(settings)) as kv_dir:
            stack = stack_plan.plan(settings, kv_dir, {**os.environ, **variables})
            code = local_stack.run(stack, work=ask)
    finally:
        for process in asking:
            process.kill()  # if a signal ended the stack
    if code:
        raise KeyboardInterrupt
    return cast("dict[str, object]", json.loads(printed))
