"""What tests with simulated workers share: a model's folder without weights, and what its workers answer."""

from __future__ import annotations

from pathlib import Path

from common.config import EngineSettings
from common.sampling import SamplingParams
from engine.sampling.draws import draw
from engine.simulated.device import SimulatedDevice
from engine.step import StepRow
from tests.router.tiny_tokenizer import endless_tokenizer_files

_LIKELIEST = draw(SamplingParams(temperature=0.0), 0)


def write_simulated_model(folder: Path) -> None:
    folder.mkdir()
    for name, content in endless_tokenizer_files().items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 4096}')
    (folder / "model.safetensors").write_bytes(b"")  # nobody reads it


def simulated_answer(model_dir: Path, prompt: list[int], num_tokens: int) -> list[int]:
    """By a device of this process."""
    settings = EngineSettings(device="simulated", num_blocks=64, max_model_len=1024)
    device = SimulatedDevice(model_dir, settings, sleep=lambda _: None, clock=iter(range(10**6)).__next__)
    tokens, start_at = list(prompt), 0
    while len(tokens) < len(prompt) + num_tokens:
        row = StepRow(
            token_ids=tokens[start_at:], num_computed_tokens=start_at, block_ids=list(range(64)), draw=_LIKELIEST
        )
        (token,) = device.execute([row])
        assert token is not None
        start_at = len(tokens)
        tokens.append(token.token_id)
    return tokens[len(prompt) :]
