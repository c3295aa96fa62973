"""What a device waits for its engine between two steps, with `--run-ahead` and without.

    python -m bench.run_ahead [--batch 1,8,32] [--time h100-8b] [--steps 200]
    python -m bench.run_ahead --device cpu [--threads 2]

The device is simulated: its steps take the time that `--time` says (`--simulated-time` of a worker), on a clock that
goes on by the CPU seconds of the engine's thread and by what the thread waits for the device. So other work on the
machine disturbs little, and the engine's own work counts as long as it takes here. Every request decodes.

`--device cpu` decodes with SmolLM2-135M on this machine's processor, by the wall clock: it wants an idle machine. There
the engine's thread takes a core from the kernels, unless they leave one.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from bench.measure import interleave, print_table
from common.config import DEFAULT_MODEL, EngineSettings, default_cache_dir
from common.sampling import SamplingParams
from engine import messages as m
from engine.blocks.host_tier import BlockCopy
from engine.core import EngineCore
from engine.device import Device, KVPlane, Ticket, do_nothing
from engine.device_thread import DeviceThread
from engine.loading.embedded_model import ensure_model
from engine.simulated.device import SimulatedDevice
from engine.step import StepInput, StepOutput
from kv_store.no_store import NoStore

WARM_UP_STEPS = 8
PROMPT_TOKENS = 256


class Clock:
    """Seconds that this thread computed or waited."""

    def __init__(self) -> None:
        self._waited = 0.0

    def now(self) -> float:
        return time.thread_time() + self._waited

    def sleep(self, seconds: float) -> None:
        self._waited += seconds


class WatchedDevice(Device):
    """Adds up how long a simulated device had nothing to do."""

    def __init__(self, device: SimulatedDevice, now: Callable[[], float]) -> None:
        self.info = device.info
        self.idle_s = 0.0
        self._device = device
        self._now = now
        self._free_at: float | None = None  # when the last step that has begun ends

    def begin(self, step: StepInput) -> Ticket:
        ticket, now = self._device.begin(step), self._now()
        free_at = now if self._free_at is None else self._free_at
        self.idle_s += max(0.0, now - free_at)
        self._free_at = max(now, free_at) + self._device.time.seconds(step.shape)
        return ticket

    def end(self, ticket: Ticket, meanwhile: Callable[[], None] = do_nothing) -> StepOutput:
        return self._device.end(ticket, meanwhile)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        self._device.copy(copies)

    def planes(self) -> list[KVPlane]:
        return self._device.planes()


def begin_to_decode(core: EngineCore, batch: int, steps: int) -> None:
    rng, info = random.Random(batch), core.ready()
    params = SamplingParams(temperature=0.0, max_tokens=steps + 2 * WARM_UP_STEPS, ignore_eos=True)
    for number in range(batch):
        prompt = [rng.randrange(info.vocab_size) for _ in range(min(PROMPT_TOKENS, info.max_model_len // 4))]
        core.handle(m.AddRequest(request_id=str(number), prompt_token_ids=prompt, sampling_params=params))
    while len(core.scheduler.decodes) < batch:
        turn(core)
    for _ in range(WARM_UP_STEPS):
        turn(core)


def decode(core: EngineCore, steps: int) -> None:
    request = core.scheduler.requests["0"]
    end = request.num_tokens + steps
    while request.num_tokens < end:
        turn(core)


def turn(core: EngineCore) -> None:
    """What the loop of an engine's process does, without its socket."""
    output = core.prepare()
    m.encode([*core.take_events(), *core.take_block_news(), m.LoadChanged(core.load)])
    core.end(core.begin(output), core.take_in_transfers)
    m.encode([*core.take_events(), m.LoadChanged(core.load)])


def release_all(core: EngineCore) -> None:
    for request_id in list(core.scheduler.requests):
        core.handle(m.Release(request_id))
    while core.has_work:
        turn(core)


def simulated(model_dir: Path, batch: int, given: EngineSettings, steps: int) -> Mapping[str, float]:
    clock = Clock()
    device = WatchedDevice(SimulatedDevice(model_dir, given, clock=clock.now, sleep=clock.sleep), clock.now)
    core = EngineCore(given, device, NoStore(), clock.now, lambda: None)
    begin_to_decode(core, batch, steps)
    start, device.idle_s = clock.now(), 0.0
    decode(core, steps)
    passed_s = clock.now() - start
    result = {
        f"batch {batch}: idle, us a step": 1e6 * device.idle_s / steps,
        f"batch {batch}: idle, % of the time": 100 * device.idle_s / passed_s,
        f"batch {batch}: us a step": 1e6 * passed_s / steps,
    }
    core.close()
    return result


def on_cpu(batch: int, core: EngineCore, steps: int) -> Mapping[str, float]:
    begin_to_decode(core, batch, steps)
    start = time.monotonic()
    decode(core, steps)
    passed_s = time.monotonic() - start
    release_all(core)
    return {f"batch {batch}: ms a step": 1e3 * passed_s / steps}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", default="1,8,32")
    parser.add_argument("--device", choices=["simulated", "cpu"], default="simulated")
    parser.add_argument("--time", default="h100-8b")
    parser.add_argument("--steps", type=int, default=0, help="200 of a simulated device, 40 of a CPU")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    steps = options.steps or (200 if options.device == "simulated" else 40)
    values: dict[str, object] = {
        "device": options.device,
        "simulated_time": options.time,
        "num_threads": options.threads,
        "enable_prefix_caching": False,
    }
    batches = [int(each) for each in options.batch.split(",")]
    values["num_blocks"] = max(batches) * (PROMPT_TOKENS + steps + 64) // 16
    values["max_num_seqs"] = max(batches)
    plain, ahead = (EngineSettings.model_validate({**values, "run_ahead": is_on}) for is_on in (False, True))
    cores: dict[str, EngineCore] = {}
    model_dir = ensure_model(DEFAULT_MODEL, default_cache_dir(), print)
    if options.device == "cpu":
        from engine.local.device import LocalDevice

        device = LocalDevice(model_dir, plain)
        device.warm_up()
        cores = {
            "plain": EngineCore(plain, device, NoStore(), time.monotonic, lambda: None),
            "ahead": EngineCore(ahead, DeviceThread(device), NoStore(), time.monotonic, lambda: None),
        }
    for batch in batches:
        systems = (
            {name: partial(on_cpu, batch, core, steps) for name, core in cores.items()}
            if cores
            else {
                name: partial(simulated, model_dir, batch, one, steps)
                for name, one in (("plain", plain), ("ahead", ahead))
            }
        )
        rows = interleave(systems, options.repeats)
        print_table(f"{options.device}, {steps} steps", rows, ratio=("ahead", "plain"))


if __name__ == "__main__":
    main()
