"""How much of Baton's code one decode step enters, and one chat over REST: what a reader has to walk through.

    python -m tools.code_entered [step | chat]

A function counts with all its lines, docstring included, once, if it was entered each of some times: so what happens to
run beside it does not count. A decode step is one of an engine with a tiny model of random weights, computed by torch,
so that the figures are the same everywhere; the files of the model itself are left out (`MODEL`). A chat is a streamed
one, from the bytes of its request to those of its last event, in a router in front of a worker without an engine
(`bench.instant_worker`), which is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import save_file

from common.config import EngineSettings, RouterSettings
from common.sampling import SamplingParams
from engine import messages as m
from engine.core import EngineCore
from engine.local.device import LocalDevice
from kv_store.base import ConnectorConfig
from kv_store.memory import MemoryConnector
from router.server import serve

ROOT = Path(__file__).resolve().parents[1]
OTHERS = ("bench/", "protos/baton/", "tests/", "tools/", ".venv/")
MODEL = ("engine/attention/", "engine/kernels/", "engine/layers.py", "engine/models/", "engine/quantized/")
REPEATS = 20
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


@dataclass(slots=True)
class Entered:
    """Functions of Baton that were entered, by their code, each with the file that it is in."""

    functions: dict[CodeType, str] = field(default_factory=dict)

    def within(self, other: Entered) -> Entered:
        """Those that `other` has, too."""
        return Entered({code: file for code, file in self.functions.items() if code in other.functions})

    def without(self, prefixes: tuple[str, ...]) -> Entered:
        """Those outside of these folders and files."""
        return Entered({code: file for code, file in self.functions.items() if not file.startswith(prefixes)})

    def lines_by_file(self) -> dict[str, int]:
        """How many lines the functions have, by file. A function inside of another one counts once."""
        lines: dict[str, set[int]] = {}
        for code, file in self.functions.items():
            lines.setdefault(file, set()).update(range(code.co_firstlineno, _last_line(code) + 1))
        return {file: len(numbers) for file, numbers in sorted(lines.items())}


def _last_line(code: CodeType) -> int:
    own = [line for _, _, line in code.co_lines() if line is not None]
    inner = [_last_line(one) for one in code.co_consts if isinstance(one, CodeType)]
    return max(own + inner, default=code.co_firstlineno)


@contextlib.contextmanager
def tracing(root: Path = ROOT, others: tuple[str, ...] = OTHERS) -> Iterator[Entered]:
    """Notes the functions under `root` that this thread enters; those that are running already do not count, until they
    go on. `others` are folders that do not count."""
    entered, known = Entered(), dict[str, str]()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event != "call" or code in entered.functions:
            return
        if (file := known.get(code.co_filename)) is None:
            path = Path(code.co_filename)
            file = path.relative_to(root).as_posix() if path.is_relative_to(root) else ""
            known[code.co_filename] = file = "" if file.startswith(others) else file
        if file and code.co_name != "<module>":
            entered.functions[code] = file

    sys.setprofile(note)
    try:
        yield entered
    finally:
        sys.setprofile(None)


def save_model(folder: Path) -> None:
    """A tiny model of random weights."""
    torch.manual_seed(0)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    shapes = {
        "embed_tokens": (256, 32),
        "norm": (32,),
        "layers.0.input_layernorm": (32,),
        "layers.0.post_attention_layernorm": (32,),
        "layers.0.self_attn.q_proj": (32, 32),
        "layers.0.self_attn.k_proj": (16, 32),
        "layers.0.self_attn.v_proj": (16, 32),
        "layers.0.self_attn.o_proj": (32, 32),
        "layers.0.mlp.gate_proj": (32, 32),
        "layers.0.mlp.up_proj": (32, 32),
        "layers.0.mlp.down_proj": (32, 32),
    }
    tensors = {f"model.{name}.weight": torch.randn(shape) / 8 for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def save_tokenizer(folder: Path) -> None:
    """One token for each letter, and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={one: index for index, one in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def decode_step() -> Entered:
    """One decode step of one request."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model(folder)
        save_tokenizer(folder)
        settings = EngineSettings.model_validate(
            {"device": "cpu", "dtype": "float32", "kernels": "torch", "num_blocks": 16}
        )
        device = LocalDevice(folder, settings)
        connector = MemoryConnector(ConnectorConfig(epoch="1", worker_id="1"))
        core = EngineCore(settings, device, connector, time.monotonic, lambda: None)
        params = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
        core.handle(m.AddRequest(request_id="1", prompt_token_ids=list(range(3, 40)), sampling_params=params))
        for _ in range(4):
            core.step()
        steps = []
        for _ in range(REPEATS):
            core.take_events()
            with tracing() as entered:
                core.step()
            steps.append(entered)
        core.close()
    return _in_each(steps)


async def chat() -> Entered:
    """One streamed chat over REST."""
    async with _router() as url:
        await _ask(url)
        chats = []
        for _ in range(REPEATS):
            with tracing() as entered:
                await _ask(url)
            chats.append(entered)
    return _in_each(chats)


@contextlib.asynccontextmanager
async def _router() -> AsyncIterator[str]:
    """A router in this process, its worker in another one."""
    with tempfile.TemporaryDirectory() as name:
        save_tokenizer(Path(name))
        worker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "bench.instant_worker", name, "1"), stdout=asyncio.subprocess.PIPE, cwd=ROOT
        )
        try:
            line = await worker.stdout.readline() if worker.stdout else b""
            listen = {"http_listen": "127.0.0.1:0", "grpc_listen": "127.0.0.1:0", "drain_timeout": 1.0}
            settings = RouterSettings.model_validate({**listen, "decode": [line.decode().strip().rpartition("=")[2]]})
            url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            stop = asyncio.Event()
            serving = asyncio.create_task(serve(settings, lambda http, _: url.set_result(http), stop))
            try:
                futures: set[asyncio.Future[Any]] = {serving, url}
                await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    serving.result()  # why it ended
                yield await url
            finally:
                stop.set()
                await serving
        finally:
            worker.kill()
            await worker.wait()


async def _ask(url: str) -> None:
    """With a client that is none of Baton's code."""
    body = json.dumps({"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "stream": True})
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(f"{head}{body}".encode())
    answer = await reader.readuntil(b"data: [DONE]\n\n")
    if b" 200 " not in answer.split(b"\r\n", 1)[0]:
        raise RuntimeError(answer.decode())
    writer.close()
    await writer.wait_closed()


def _in_each(runs: list[Entered]) -> Entered:
    found = runs[0]
    for one in runs[1:]:
        found = found.within(one)
    return found


def show(title: str, entered: Entered, console: Console) -> None:
    lines = entered.lines_by_file()
    functions = list(entered.functions.values())
    table = Table(title=title)
    table.add_column("file")
    table.add_column("functions", justify="right")
    table.add_column("lines", justify="right")
    for file, num in lines.items():
        table.add_row(file, str(functions.count(file)), str(num))
    table.add_section()
    table.add_row(f"{len(lines)} files", str(len(functions)), str(sum(lines.values())))
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("step", "chat"), help="both if left out")
    wanted = parser.parse_args().what
    console = Console(width=100)
    if wanted in (None, "step"):
        step = decode_step()
        show("One decode step without its model", step.without(MODEL), console)
        show("One decode step, with its model", step, console)
    if wanted in (None, "chat"):
        show("One streamed chat over REST", asyncio.run(chat()), console)


if __name__ == "__main__":
    main()
