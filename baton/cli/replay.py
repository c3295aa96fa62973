"""`baton replay`: computes the steps that a worker recorded once more, and says where the results differ."""

from __future__ import annotations

import json
from pathlib import Path

import click

from baton.cli.options import AS_JSON, SettingsCommand
from common.config import EngineSettings


def replay(settings: EngineSettings, *, file: str, as_json: bool) -> int:
    """Exit code 1 if a result differs. The file says what the steps were recorded with; what is set here goes first."""
    from common.model_files import open_model
    from engine.devices import open_device
    from engine.loading.embedded_model import ensure_model
    from engine.local.device_choice import SIMULATED
    from engine.replay.replay import replay as compute
    from engine.replay.step_file import read_steps

    header, steps = read_steps(Path(file))
    given = settings.model_fields_set
    recorded: dict[str, object] = {
        "model": header.model,
        "dtype": header.spec.dtype,
        "quantization": header.quantization,
        "block_size": header.spec.block_size,
        "num_blocks": header.num_blocks,
        "max_model_len": header.max_model_len,
        "host_cache_gb": header.host_cache_gb,
    }
    if header.device == SIMULATED:
        recorded["device"] = SIMULATED
    settings = settings.model_copy(update={name: value for name, value in recorded.items() if name not in given})
    folder = open_model(ensure_model(settings.model, settings.cache_dir, click.echo)).path
    device = open_device(folder, settings)
    compared = compute(header, steps, device)
    device.warm_up()
    num_steps = num_rows = num_different = 0
    largest = recorded_s = elapsed_s = 0.0
    for step in compared:
        num_steps += 1
        num_rows += step.num_rows
        num_different += len(step.differences)
        largest = max(largest, step.largest)
        recorded_s, elapsed_s = recorded_s + step.recorded_s, elapsed_s + step.elapsed_s
        for line in step.differences if not as_json else ():
            click.echo(f"step {step.number}, {line}")
    if as_json:
        values = {"steps": num_steps, "rows": num_rows, "different": num_different, "largest_difference": largest}
        click.echo(json.dumps({**values, "recorded_s": recorded_s, "elapsed_s": elapsed_s}))
    else:
        said = f"{num_different} results differ" if num_different else "all tokens are equal"
        click.echo(f"{num_rows} rows of {num_steps} steps: {said}; largest difference of a logprob {largest:.2g}")
        click.echo(f"device time: recorded {recorded_s:.3f} s on {header.device}, here {elapsed_s:.3f} s")
    return 1 if num_different else 0


REPLAY = SettingsCommand(
    "replay",
    EngineSettings,
    replay,
    about="Computes the steps again that a worker wrote with --record-steps, and says where the results differ.",
    examples=["baton replay steps.bin", "baton replay steps.bin --kernels avx2", "baton replay steps.bin --json"],
    params=[click.Argument(["file"]), AS_JSON],
)
