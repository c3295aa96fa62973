"""What a simulated worker's processes load. A hundred of them fit into one machine only without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.router.tiny_tokenizer import endless_tokenizer_files

ENGINE = """
import sys, numpy as np
from pathlib import Path
import engine.process  # noqa: F401
from common.config import WorkerSettings
from engine.core import EngineCore
from engine.devices import load_drafter, open_device
from engine.learning.start import start_learning
from engine.sampling.grammars import GrammarCompiler
from kv_store.base import ConnectorConfig, LocalBlock
from kv_store.registry import create_connector

folder = Path(sys.argv[1])
settings = WorkerSettings(device="simulated", num_blocks=8, kv_dir=str(folder))
device = open_device(folder, settings)
device.warm_up()
observed, _ = start_learning(device, settings)
assert load_drafter(device, settings) is None
connector = create_connector("shared_storage", ConnectorConfig(section={"kv_dir": str(folder / "kv")}))
core = EngineCore(settings, observed, connector, clock=lambda: 0.0, wake=lambda: None)
connector.publish(1, [LocalBlock(0, 0, bytes(16))])
while not (results := connector.poll()):
    pass
assert results[0].error is None, results
core.close()
print({"torch", "transformers", "tokenizers.tokenizers"} & set(sys.modules))
"""


@pytest.mark.slow
def test_an_engine_with_a_simulated_device_has_no_torch(tmp_path: Path) -> None:
    for name, content in endless_tokenizer_files().items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 128}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    done = subprocess.run([sys.executable, "-c", ENGINE, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "set()", done.stderr
