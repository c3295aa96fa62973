"""Models of time computed from data sheets: a processor's bandwidth and arithmetic, a model's sizes.

    layers(tokens) = max(bytes of the layers / bandwidth, 2 * parameters of the layers * tokens / arithmetic) + overhead

The head likewise by its rows; KV is read once for each token of context, and attention of a chunk multiplies each of
its (query, key) pairs (roofline: Williams et al., 2009). Nothing here was measured on the GPUs that it names. `baton
profile` makes a model of time that was.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.batch_time import FEATURES, BatchTime, BatchTimeKey, Regime, RegimeTime, Table
from common.batch_time_file import decode
from common.errors import ConfigError

_KNOTS = (0, 1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 8192, 16384)
# Of a device that a file describes, which does not say how much KV it holds, nor how many bytes a token's are.
_UNMEASURED_KV_TOKENS = 65_536
_UNMEASURED_KV_TOKEN_BYTES = 131_072


@dataclass(slots=True, frozen=True, kw_only=True)
class Processor:
    """One or several devices that compute a step together."""

    name: str
    bandwidth: float  # bytes a second that it reads, in practice
    arithmetic: float  # operations a second in products, in practice
    step_overhead_s: float  # of a step, whatever it computes
    memory_bytes: float  # for weights and KV


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelSize:
    """A decoder with grouped-query attention, in two bytes a number."""

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    parameters: float  # of all layers
    head_parameters: float  # of the product that makes logits

    @property
    def kv_bytes(self) -> int:
        """Of one token."""
        return 2 * 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(slots=True, frozen=True, kw_only=True)
class SimulatedTime:
    """How long steps of a simulated device take, and how much KV it holds."""

    time: BatchTime
    kv_tokens: int
    kv_token_bytes: int
    source: str  # for people: where the times are from
    free_rows: float  # that a step multiplies while it reads the weights


# Peaks of the data sheet (3.35 TB/s, 989 TFLOP/s dense in bfloat16, 80 GB) times 0.8 and 0.6. Four of them: times 0.85
# again, for what they tell each other.
_H100 = Processor(
    name="H100 SXM", bandwidth=0.8 * 3.35e12, arithmetic=0.6 * 989e12, step_overhead_s=0.0006, memory_bytes=0.9 * 80e9
)
_FOUR_H100 = Processor(
    name="4 x H100 SXM",
    bandwidth=4 * 0.85 * _H100.bandwidth,
    arithmetic=4 * 0.85 * _H100.arithmetic,
    step_overhead_s=0.002,
    memory_bytes=4 * _H100.memory_bytes,
)
# Two cores: 31 GB/s and 1.6 TFLOP/s in bfloat16, as `baton doctor` says there; half of the arithmetic in whole steps.
_XEON = Processor(
    name="2 cores of a Xeon with AMX",
    bandwidth=28e9,
    arithmetic=0.8e12,
    step_overhead_s=0.0008,
    memory_bytes=2e9,
)
_8B = ModelSize(
    name="Llama-3.1-8B",
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    parameters=6.98e9,
    head_parameters=0.525e9,
)
_70B = ModelSize(
    name="Llama-3.1-70B",
    num_layers=80,
    num_heads=64,
    num_kv_heads=8,
    head_dim=128,
    parameters=68.5e9,
    head_parameters=1.05e9,
)
_135M = ModelSize(
    name="SmolLM2-135M",
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    parameters=0.106e9,
    head_parameters=0.028e9,
)
SHEETS = {"h100-8b": (_H100, _8B), "4xh100-70b": (_FOUR_H100, _70B), "xeon-135m": (_XEON, _135M)}


def simulated_time(name: str) -> SimulatedTime:
    """By a name of `SHEETS`, or of a file that `baton profile` wrote. Raises `ConfigError` with one line."""
    if sheet := SHEETS.get(name):
        return of_sheet(*sheet)
    path = Path(name)
    if not path.is_file():
        raise ConfigError("--simulated-time", f"{name} is neither a file nor one of {', '.join(SHEETS)}")
    try:
        time = decode(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError("--simulated-time", f"{name} is of no use: {error}") from error
    source = f"measured on {time.key.processor}, by {name}"
    return SimulatedTime(
        time=time,
        kv_tokens=_UNMEASURED_KV_TOKENS,
        kv_token_bytes=_UNMEASURED_KV_TOKEN_BYTES,
        source=source,
        free_rows=1.0,
    )


def of_sheet(processor: Processor, model: ModelSize) -> SimulatedTime:
    layers = _products(processor, model.parameters, processor.step_overhead_s)
    head = _products(processor, model.head_parameters, 0.0, from_none=True)
    coefficients = dict.fromkeys(FEATURES, 0.0)
    coefficients["decode_context"] = model.kv_bytes / processor.bandwidth
    coefficients["chunk_past"] = model.kv_bytes / processor.bandwidth
    coefficients["chunk_pairs"] = 4.0 * model.num_layers * model.num_heads * model.head_dim / processor.arithmetic
    regime = RegimeTime(
        layers=layers, head=head, coefficients=tuple(coefficients[name] for name in FEATURES), p90=0.02, p99=0.05
    )
    key = BatchTimeKey(
        spec=model.name,
        quantization="none",
        device="simulated",
        processor=processor.name,
        kernels="data sheet",
        num_threads=1,
    )
    weights = 2.0 * (model.parameters + model.head_parameters)
    return SimulatedTime(
        time=BatchTime(key=key, regimes=dict.fromkeys(Regime, regime)),
        kv_tokens=int((processor.memory_bytes - weights) / model.kv_bytes),
        kv_token_bytes=model.kv_bytes,
        source=f"computed from the data sheet of {processor.name} and the sizes of {model.name}, not measured",
        free_rows=processor.arithmetic / processor.bandwidth,
    )


def _products(processor: Processor, parameters: float, overhead_s: float, *, from_none: bool = False) -> Table:
    """Seconds by rows. With `from_none`, no rows cost nothing: a step without a head reads no weights of it."""
    read_s = 2.0 * parameters / processor.bandwidth
    row_s = 2.0 * parameters / processor.arithmetic
    seconds = [overhead_s + max(read_s, row_s * rows) for rows in _KNOTS]
    if from_none:
        seconds[0] = 0.0
    return Table(knots=tuple(map(float, _KNOTS)), seconds=tuple(seconds), last_slope=row_s)
