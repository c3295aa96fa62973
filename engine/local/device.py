"""The device of this process: weights and KV cache in its memory, one forward pass for each step.

It may be a rank of several that compute one model together. Then all of them are given the same steps and the same
copies in the same order. Rank 0 draws tokens; the others take its tokens over.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from common.config import EngineSettings
from common.errors import ConfigError, InternalError, StartupError
from common.sampling import SamplingParams
from common.types import KVCacheSpec, SampledToken
from engine.attention.base import AttentionShape, StepAttention
from engine.attention.registry import attention_backend
from engine.blocks.host_tier import BlockCopy
from engine.context_length import fit_context
from engine.device import Device, DeviceInfo, KVPlane, StepGivenUp, Ticket, do_nothing
from engine.device_copies import as_current, read, to_device, wait_for
from engine.kernels.library import Kernels
from engine.layers import Linear
from engine.local.graphs import DecodeGraphs, graph_sizes
from engine.local.host_cache import allocate_host_cache, copy_blocks
from engine.local.loading import LoadedModel, load_model
from engine.local.memory import num_cache_blocks
from engine.local.scores import score_tokens
from engine.models.stage import Stage
from engine.ranks.data_ranks import DataRanks, deal
from engine.ranks.group import OneRank, RankGroup
from engine.ranks.pipeline import Pipeline
from engine.sampling.draws import draw
from engine.sampling.sampler import sample
from engine.step import Draw, StepInput, StepOutput, StepRow
from kv_store.host_pages import prepare_pages

log = logging.getLogger(__name__)

WARM_UP_TOKENS = 64
_RANK_TEXT_BYTES = 128
_NO_TOKEN = -1  # between ranks, for a row that drew none
KEPT_STEPS = 2  # whose drawn tokens a later step may begin with


class LocalDevice(Device):
    """`kv_cache` is `[num_blocks, *spec.block_shape]`, in the dtype that was chosen."""

    def __init__(
        self,
        model_dir: Path,
        settings: EngineSettings,
        *,
        attention: str | None = None,
        raises: bool = False,
        group: RankGroup | None = None,
        pipeline: Pipeline | None = None,
        allocate: Callable[[Sequence[int], torch.dtype], torch.Tensor] | None = None,
    ) -> None:
        """Loads the weights and allocates the KV cache. `attention` names a backend; the device's fastest if None. A
        device that `raises` passes on what stops a step in `end`: it may be an exception of the program that calls it.
        One of several ranks always does, since it cannot go on beside the others after half a step. `group`: the other
        ranks; None if there are none. Its planes are then those of this rank's heads, and equal on ranks that share
        heads; it has as many blocks as all ranks have. `pipeline`: the other stages, if this is one of several; `group`
        are then the ranks of this stage. The planes have all layers, and a stage writes its own. `allocate` gives a KV
        cache on the CPU its memory.

        Raises `StartupError` with one line if the model cannot be served as set: a file or tensor is missing, the
        device is not there, memory does not suffice, the context is longer than the model or the cache allows, or the
        ranks cannot share the model.
        """
        group = group or OneRank()
        self._pipeline = pipeline = pipeline or Pipeline(Stage(), everybody=group)
        is_alone = pipeline.everybody.size == 1
        if is_alone and settings.num_ranks > 1:
            raise ConfigError(settings.flag_of_ranks, "is for workers: here one process computes the whole model")
        if settings.data_parallel_size > 1:
            group = DataRanks(group)
        self._data_ranks = group if isinstance(group, DataRanks) else None
        self._group = group
        loaded = load_model(model_dir, settings, group, pipeline)
        spec, model = loaded.spec, loaded.model
        self.device = loaded.device
        self.dtype = loaded.dtype
        self._model = model
        self._kernels = loaded.kernels
        self._padding = loaded.padding
        self._raises = raises or not is_alone
        self._check_ranks(spec, loaded)
        num_caches = 1 if self._data_ranks is not None else group.num_here
        num_blocks = self._least(
            num_cache_blocks(spec, loaded.device, settings, num_caches, num_stages=pipeline.stage.count)
        )
        max_model_len = fit_context(loaded.max_model_len, num_blocks, settings)
        may_record = loaded.device.type == "cuda" and not settings.enforce_eager and is_alone
        cache_shape = (num_blocks + may_record, *spec.block_shape)
        blocks = (  # one more than the engine knows, for the padding of recorded graphs
            torch.empty(cache_shape, dtype=loaded.dtype, device=loaded.device)
            if allocate is None
            else allocate(cache_shape, loaded.dtype)
        )
        self.kv_cache = blocks[:num_blocks]
        if pipeline.stage.is_last:  # the others have the same memory
            prepare_pages(self.kv_cache)
        self._host_cache = allocate_host_cache(settings, spec, loaded.device, num_caches)
        self.info = DeviceInfo(
            spec=spec,
            num_blocks=num_blocks,
            num_host_blocks=len(self._host_cache),
            max_model_len=max_model_len,
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            window=loaded.window,
            eos_token_ids=loaded.eos_token_ids,
            dtype_reason=loaded.dtype_reason,
            device=str(loaded.device),
            device_reason=loaded.device_reason,
            kernels=loaded.kernels_choice.instruction_set,
            kernels_reason=loaded.kernels_choice.reason,
            gives_up=loaded.device.type == "cpu" and is_alone,
            free_rows=loaded.free_rows,
        )
        shape = AttentionShape(
            num_heads=model.num_heads,
            softmax_scale=model.softmax_scale,
            windows=model.windows,
            soft_cap=model.soft_cap,
            value_dim=model.latent_value_dim,
            sinks=model.sinks,
        )
        self._attention = attention_backend(
            blocks,
            spec,
            shape,
            attention,
            self._kernels,
            max_table_blocks=-(-max_model_len // spec.block_size),
            cascade=settings.cascade_attention == "auto",
        )
        self._graphs: DecodeGraphs | None = None
        self._graph_sizes = graph_sizes(settings.max_num_seqs) if may_record else []
        self._states: _States | None = None
        self._begun: dict[int, StepInput] = {}
        self._drawn: deque[tuple[int, list[SampledToken | None]]] = deque(maxlen=KEPT_STEPS)
        log.info(
            "model ready",
            extra={
                "num_blocks": num_blocks,
                "max_model_len": max_model_len,
                "device": self.info.device,
                "device_reason": self.info.device_reason,
                "dtype": spec.dtype,
                "dtype_reason": self.info.dtype_reason,
                "kernels": self.info.kernels,
                "kernels_reason": self.info.kernels_reason,
            },
        )

    @property
    def kernels(self) -> Kernels | None:
        """This machine's; None if torch computes everything."""
        return self._kernels

    @property
    def kernels_name(self) -> str:
        """The instruction set of the kernels that compute, or torch."""
        return "torch" if self._kernels is None else self._kernels.choice.instruction_set

    def keep_states(self, layers: Sequence[int] = ()) -> None:
        """From now on the last step's states are kept, and no step is a recorded graph's, which gives none. `layers`:
        what each of them begins with is kept, too. Raises `StartupError` if this model cannot tell that."""
        if layers:
            self._model.keep_layer_inputs(layers)
        self._states, self._graph_sizes, self._graphs = _States(bool(layers)), [], None

    def row_of_state(self, block_ids: Sequence[int], position: int) -> int | None:
        """Where the state of a token is that was the last one of a row of the last step; its KV lies at `position` of
        these blocks. None if that step had no such row."""
        rows = None if self._states is None else self._states.rows.get(self._slot(block_ids, position))
        return None if rows is None else rows[-1]

    def rows_of_states(self, block_ids: Sequence[int], stop: int) -> list[int]:
        """Where the states of the tokens before position `stop` of these blocks are, in their order: as many as the
        last step computed without a gap. The last of them was the last one of a row of that step, or there are none."""
        found: list[range] = []
        while self._states is not None and stop > 0:
            rows = self._states.rows.get(self._slot(block_ids, stop - 1))
            if rows is None or len(rows) > stop:
                break
            found.append(rows)
            stop -= len(rows)
        return [row for rows in reversed(found) for row in rows]

    def states(self, rows: Sequence[int]) -> torch.Tensor:
        """The last hidden states of these rows, as the model's head gets them, `[len(rows), hidden_size]`."""
        if self._states is None:
            raise RuntimeError("no states are kept")
        return self._model.last_states(self._states.hidden[to_device(rows, self.device)])

    def layer_inputs(self, rows: Sequence[int]) -> torch.Tensor:
        """What the layers of `keep_states` began with, side by side, of these rows of the last step:
        `[len(rows), number of layers * hidden_size]`."""
        if self._states is None or self._states.inputs is None:
            raise RuntimeError("no inputs of layers are kept")
        return self._states.inputs[to_device(rows, self.device)]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """What the model's embedding has for `[num_tokens]` tokens, not scaled: `[num_tokens, hidden_size]`."""
        return self._model.embed(token_ids)

    def best_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """What the model's head finds likeliest after each of `states` `[num_rows, hidden_size]`, as its norm gives
        them: `[num_rows]` int64."""
        return self._model.best_after_norm(states)

    def linear(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, is_head: bool = False) -> Linear:
        """A product on this device, in its dtype, computed as the model's are. `is_head`: it decides between tokens."""
        own = [None if one is None else one.to(self.device, self.dtype) for one in (weight, bias)]
        linear = Linear.of(own[0], own[1], is_head=is_head)  # type: ignore[arg-type]
        linear.finish(self._kernels)
        return linear

    def _keep(self, states: _States, hidden: torch.Tensor, rows: Iterable[StepRow]) -> None:
        states.hidden, states.rows = hidden, {}
        if states.has_inputs:
            states.inputs = self._model.take_layer_inputs()
        start = 0
        for row in rows:
            end = start + len(row.token_ids)
            last = row.num_computed_tokens + len(row.token_ids) - 1
            states.rows[self._slot(row.block_ids, last)] = range(start, end)
            start = end

    def _slot(self, block_ids: Sequence[int], position: int) -> tuple[int, int]:
        number, offset = divmod(position, self.info.spec.block_size)
        return block_ids[number], offset

    def begin(self, step: StepInput) -> Ticket:
        """Only checks the step and copies its blocks: this thread is what computes it, in `end`."""
        for row in step.rows:
            self.check(row)
        if step.copies:
            self.copy(step.copies)
        self._begun[step.number] = step
        return Ticket(step.number)

    def end(self, ticket: Ticket, meanwhile: Callable[[], None] = do_nothing) -> StepOutput:
        """Computes the step. `meanwhile` is called after each layer, or after some short ones."""
        step = self._begun.pop(ticket.number)
        beside = _Timed(meanwhile)
        start = time.perf_counter()
        try:
            with as_current(self.device):
                output = self._compute_groups(step, beside)
        except StepGivenUp:
            return StepOutput.given_up(step)
        except Exception as error:
            if self._raises:
                raise
            return _failed(step, error)
        self._drawn.append((ticket.number, output.tokens))
        return replace(output, elapsed_s=time.perf_counter() - start - beside.seconds)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        copy_blocks(copies, self.kv_cache, self._host_cache)

    def planes(self) -> list[KVPlane]:
        return [KVPlane(spec=self.info.spec, cache=self.kv_cache)]

    def warm_up(self) -> None:
        """Computes a prompt, a token after it and a token after the longest context, so that no request waits for what
        happens once: choosing kernels, allocating workspaces, recording graphs."""
        for row in warm_up_rows(self.info):
            self.execute([row])
        if self._graph_sizes and self._attention.has_fixed_decode:
            with as_current(self.device), torch.inference_mode():
                self._graphs = DecodeGraphs(
                    self._model, self._attention, spare_block=self.info.num_blocks, sizes=self._graph_sizes
                )

    def _compute_groups(self, step: StepInput, between_layers: Callable[[], None]) -> StepOutput:
        """As `_compute`, one group of rows after the other if this is one of several stages that computes the step so:
        the first stage may begin a group while a later one is busy with the group before."""
        rows, tell = step.rows, self._pipeline.tell
        groups = self._pipeline.groups(rows)
        if groups is None:
            output = self._compute([self._resolved(row) for row in rows], between_layers)
            if tell is not None:
                tell(step.number, range(len(rows)), output.tokens)
            return output
        tokens: list[SampledToken | None] = []
        for group in groups:
            drawn = self._compute([self._resolved(rows[index]) for index in group], between_layers).tokens
            if tell is not None:
                tell(step.number, group, drawn)
            tokens += drawn
        return StepOutput(tokens=tokens)

    def _resolved(self, row: StepRow) -> StepRow:
        """The row with the token that an earlier step drew as its first one; itself if it begins with none, or if it is
        the first stage that embeds it. Raises `InternalError` if that step drew none, or has not ended."""
        first, pipeline = row.first, self._pipeline
        if first is None or not pipeline.stage.is_first:
            return row
        if pipeline.drawn is not None:
            return replace(row, token_ids=[pipeline.drawn(first), *row.token_ids[1:]], first=None)
        token = next((tokens[first.row] for number, tokens in self._drawn if number == first.step), None)
        if token is None:
            raise InternalError(f"row {first.row} of step {first.step} drew no token that is still known")
        return replace(row, token_ids=[token.token_id, *row.token_ids[1:]], first=None)

    @torch.inference_mode()
    def _compute(self, rows: Sequence[StepRow], between_layers: Callable[[], None]) -> StepOutput:
        if not rows:
            return StepOutput(tokens=[])
        if self._graphs is not None and self._graphs.takes(rows):
            return StepOutput(tokens=self._replay(self._graphs, rows))
        # Decodes first, by length: attention then sees neighbours that it can compute together.
        order = sorted(range(len(rows)), key=lambda index: _attention_order(rows[index]))
        if self._pipeline.stage.count > 1:
            order = self._pipeline.order(rows) or order
        ordered = [rows[index] for index in order]
        hidden = self._forward(ordered, between_layers)
        if not self._pipeline.stage.is_last:
            return StepOutput(tokens=[None] * len(rows))
        if self._states is not None:
            self._keep(self._states, hidden, ordered)
        draws = [row.draw for row in ordered if row.draw is not None and row.score is None and not row.num_pooled]
        if len(draws) < len(hidden):
            return self._results(rows, order, hidden, between_layers)
        tokens = dict(zip(order, self._sample(hidden, draws), strict=True))
        return StepOutput(tokens=[tokens[index] for index in range(len(rows))])

    def _results(
        self, rows: Sequence[StepRow], order: Sequence[int], hidden: torch.Tensor, between_layers: Callable[[], None]
    ) -> StepOutput:
        """Of rows that do not all decode. `hidden`: states of all new tokens, in the `order` of rows."""
        tokens: list[SampledToken | None] = [None] * len(rows)
        drawing: list[int] = []
        draws: list[Draw] = []
        last_tokens: list[int] = []
        pooled: dict[int, torch.Tensor] = {}
        scores: dict[int, list[SampledToken]] = {}
        end = 0
        for index in order:
            row = rows[index]
            start, end = end, end + len(row.token_ids)
            if row.num_pooled:
                pooled[index] = self._pool(hidden[end - row.num_pooled : end])
            if row.score is not None:
                scores[index] = score_tokens(hidden[start:end], row.score, self._model, between_layers)
            if row.draw is not None:
                drawing.append(index)
                draws.append(row.draw)
                last_tokens.append(end - 1)
        totals = dict(zip(pooled, read(list(pooled.values())), strict=True)) if pooled else {}
        if draws:
            states = hidden if len(draws) == len(hidden) else hidden[to_device(last_tokens, self.device)]
            for index, token in zip(drawing, self._sample(states, draws), strict=True):
                tokens[index] = token
        if not draws and not pooled and not scores:  # nothing was read: others may read the blocks once this ends
            wait_for(self.device)
        return StepOutput(tokens=tokens, scores=scores, pooled=totals)

    def _replay(self, graphs: DecodeGraphs, rows: Sequence[StepRow]) -> list[SampledToken | None]:
        """The same as a step of such rows gives, by a recorded graph."""
        order, logits, best = graphs.run(rows)
        drawing = [place for place, index in enumerate(order) if rows[index].draw is not None]
        draws = [draw for index in order if (draw := rows[index].draw) is not None]
        tokens: list[SampledToken | None] = [None] * len(rows)
        if not draws:
            wait_for(self.device)
            return tokens
        if len(draws) < len(rows):
            index = to_device(drawing, self.device)
            logits, best = logits[index], best[index]
        for place, token in zip(drawing, self._choose(best, lambda: logits, draws), strict=True):
            tokens[order[place]] = token
        return tokens

    def _forward(self, rows: Sequence[StepRow], between_layers: Callable[[], None]) -> torch.Tensor:
        """Hidden states of all new tokens, `[that many, hidden_size]`, row by row."""
        if self._data_ranks is not None:
            return self._forward_dealt(self._data_ranks, rows, between_layers)
        if self._pipeline.stage.count > 1:
            return self._pipeline.forward(
                rows, lambda part, before: self._forward_from(part, before, between_layers), between_layers
            )
        return self._forward_from(rows, None, between_layers)

    def _forward_dealt(
        self, ranks: DataRanks, rows: Sequence[StepRow], between_layers: Callable[[], None]
    ) -> torch.Tensor:
        """As `_forward`, if each rank computes some of the rows; zeros for tokens that nothing is asked of."""
        parts = deal(rows, ranks.size, self.info.spec.block_size, self.info.hidden_size)
        own = [rows[index] for index in parts[ranks.rank]]
        if own:
            states = self._forward_from(own, None, between_layers)
        else:
            nothing = torch.empty(0, dtype=torch.long)
            states = self._model.forward(nothing, nothing, _NoAttention(), between_layers)
        starts = np.cumsum([0, *(len(row.token_ids) for row in rows)])
        wanted = [[int(starts[index]) + at for index in part for at in _wanted(rows[index])] for part in parts]
        firsts = np.cumsum([0, *(len(row.token_ids) for row in own)])
        own_wanted = [int(first) + at for first, row in zip(firsts, own, strict=False) for at in _wanted(row)]
        hidden = torch.zeros(int(starts[-1]), self.info.hidden_size)
        if any(wanted):
            joined = ranks.join(states[own_wanted].float(), [len(each) for each in wanted])
            hidden[[at for each in wanted for at in each]] = joined
        else:  # nobody begins the next step before all have written their KV
            ranks.all_gather(torch.zeros(1))
        return hidden.to(self._model.states_dtype)

    def _forward_from(
        self, rows: Sequence[StepRow], hidden: torch.Tensor | None, between_layers: Callable[[], None]
    ) -> torch.Tensor:
        """`hidden`: what the stage before gave for the rows; None in the first stage."""
        token_ids = [token_id for row in rows for token_id in row.token_ids]
        starts = [row.num_computed_tokens for row in rows]
        counts = [len(row.token_ids) for row in rows]
        step = self._attention.prepare(rows)
        positions = to_device(_positions(starts, counts), self.device)
        if hidden is not None:
            return self._model.forward_from(hidden, positions, step, between_layers)
        return self._model.forward(to_device(token_ids, self.device), positions, step, between_layers)

    def _sample(self, states: torch.Tensor, draws: Sequence[Draw]) -> list[SampledToken | None]:
        """A token for each row of `states`. If all want the likeliest one and nothing else, no logits are kept."""
        best = self._model.best_tokens(states) if all(one.is_likeliest for one in draws) else None
        return self._choose(best, lambda: self._model.logits(states), draws)

    def _choose(
        self, best: torch.Tensor | None, logits: Callable[[], torch.Tensor], draws: Sequence[Draw]
    ) -> list[SampledToken | None]:
        """`best`: the likeliest token of each row, if it is known. `logits` are changed."""
        if best is not None and all(one.is_likeliest for one in draws):
            (token_ids,) = read([best])
            if not self._padding.has_any_of(token_ids):
                return [SampledToken(int(token_id)) for token_id in token_ids]
        masked = self._padding.mask(logits())
        return sample(masked, draws, self._kernels) if self._group.size == 1 else self._draw_once(masked, draws)

    def _draw_once(self, masked: torch.Tensor, draws: Sequence[Draw]) -> list[SampledToken | None]:
        """As `sample`, on rank 0 alone: the other ranks take its tokens over."""
        drawn: list[SampledToken | None] = [None] * len(draws)
        if self._group.rank == 0:
            drawn = sample(masked, draws, self._kernels)
        # Other ranks need them if a later step begins with one of them.
        own = torch.tensor([_NO_TOKEN if token is None else token.token_id for token in drawn], device=self.device)
        (token_ids,) = read([self._group.all_gather(own)[: len(draws)]])
        if self._group.rank == 0:
            return drawn
        return [None if token_id == _NO_TOKEN else SampledToken(int(token_id)) for token_id in token_ids]

    def _check_ranks(self, spec: KVCacheSpec, loaded: LoadedModel) -> None:
        """Raises `StartupError` that names a rank which has another model, or computes it otherwise: each rank computes
        norms and routers for itself, and all have to come to the same bits."""
        everybody = self._pipeline.everybody
        own = f"KV {spec.fingerprint()}, kernels {loaded.kernels_choice.instruction_set}, torch {torch.__version__}"
        padded = bytearray(own.encode()[:_RANK_TEXT_BYTES].ljust(_RANK_TEXT_BYTES))
        gathered = everybody.all_gather(torch.frombuffer(padded, dtype=torch.uint8).to(loaded.device))
        texts = [bytes(row).decode().strip() for row in gathered.view(everybody.size, -1).tolist()]
        for rank, text in enumerate(texts):
            if text != texts[0]:
                raise StartupError(f"rank {rank} computes {text}; rank 0 computes {texts[0]}; they have to be equal")

    def _least(self, count: int) -> int:
        """The smallest of what the ranks have."""
        return int(self._pipeline.everybody.all_gather(torch.tensor([count], device=self.device)).min())

    def _pool(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.last_states(hidden).float().sum(dim=0)


def _failed(step: StepInput, error: Exception) -> StepOutput:
    log.exception("a step failed", extra={"num_rows": len(step.rows)})
    reason = f"the device failed to compute this step: {type(error).__name__}"
    return StepOutput(tokens=[None] * len(step.rows), failures=dict.fromkeys(range(len(step.rows)), reason))


class _NoAttention(StepAttention):
    """Of a step of which this rank has no row."""

    def forward(self, layer: int, q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        raise InternalError("a data rank attends in a step of which it has no row")


class _States:
    """Of the last step."""

    def __init__(self, has_inputs: bool) -> None:
        self.hidden = torch.empty(0)  # [num_tokens, hidden_size]
        self.has_inputs = has_inputs
        self.inputs: torch.Tensor | None = None  # of some layers, [num_tokens, number of layers * hidden_size]
        # Of it, for each row of the step, by (block, offset) of its last token's KV.
        self.rows: dict[tuple[int, int], range] = {}


class _Timed:
    """Calls a function, and adds up the seconds that it takes."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._function = function
        self.seconds = 0.0

    def __call__(self) -> None:
        start = time.perf_counter()
        self._function()
        self.seconds += time.perf_counter() - start


def warm_up_rows(info: DeviceInfo) -> Iterator[StepRow]:
    """A prompt, a token after it and a token after the longest context, each a step of its own."""
    num_tokens = min(WARM_UP_TOKENS, info.num_blocks * info.spec.block_size - 1, info.max_model_len - 1)
    blocks = list(range(-(-(num_tokens + 1) // info.spec.block_size)))
    longest = [0] * -(-info.max_model_len // info.spec.block_size)
    likeliest = draw(SamplingParams(temperature=0.0), 0)
    for start, token_ids, block_ids in (
        (0, [0] * num_tokens, blocks),
        (num_tokens, [0], blocks),
        (info.max_model_len - 1, [0], longest),
    ):
        yield StepRow(token_ids=token_ids, num_computed_tokens=start, block_ids=block_ids, draw=likeliest)


def _wanted(row: StepRow) -> range | list[int]:
    """Which of the new tokens' hidden states are read after the last layer."""
    count = len(row.token_ids)
    if row.score is not None:
        return range(count)
    if row.num_pooled:
        return range(count - row.num_pooled, count)
    return [] if row.draw is None else [count - 1]


def _attention_order(row: StepRow) -> tuple[bool, int]:
    return len(row.token_ids) > 1, row.num_computed_tokens


def _positions(starts: list[int], counts: list[int]) -> list[int] | torch.Tensor:
    """The position of each new token in its own sequence, of which `counts` begin at `starts`."""
    if max(counts) == 1:
        return starts  # of single tokens a list is the fastest
    first, count = np.array(starts), np.array(counts)
    ends = count.cumsum()
    return torch.from_numpy(np.arange(ends[-1]) + np.repeat(first + count - ends, count))
