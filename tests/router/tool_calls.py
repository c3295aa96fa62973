"""A model with tools, and a worker whose answer calls one twice."""

from __future__ import annotations

from typing import Any

import pytest

from tests.router import chat_templates
from tests.router.conftest import StartWorker
from tests.router.tiny_tokenizer import ids_of
from tests.support.fake_worker import FakeWorker

TOOL: Any = {
    "type": "function",
    "function": {
        "name": "f",
        "description": "Does it",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
    },
}
TWO_TOOLS: Any = [TOOL, {"type": "function", "function": {"name": "g", "strict": True}}]
ASK: Any = [{"role": "user", "content": "Do"}]
TWO_CALLS = (
    '<think>hm</think>\n\nYes.\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "f", "arguments": {"x": 2}}\n</tool_call>'
)


@pytest.fixture
async def worker(start_worker: StartWorker) -> FakeWorker:
    """Import it by name in the place of every router test's `worker`."""
    worker = await start_worker()
    worker.chat_template = chat_templates.HERMES
    worker.answer = ids_of(TWO_CALLS)
    worker.false_info = {"max_model_len": 1024}
    return worker
