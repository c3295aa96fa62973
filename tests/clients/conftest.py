"""The stack that clients ask."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from common.config import DEFAULT_MODEL, default_cache_dir
from engine.loading.embedded_model import ensure_model, package_is_installed
from tests.integration.stack import Stack, running
from tests.router.chat_templates import HERMES

MODEL = "with-tools"


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The embedded model, which knows no tools, with a chat template that writes them out."""
    if not package_is_installed():
        pytest.skip("the embedded model's package is not installed")
    folder = tmp_path_factory.mktemp("clients")
    model = folder / MODEL
    model.mkdir()
    for file in ensure_model(DEFAULT_MODEL, default_cache_dir(), print).iterdir():
        if file.name != "chat_template.jinja":
            (model / file.name).symlink_to(file)
    (model / "chat_template.jinja").write_text(HERMES)
    kept = (f"--batch-file={folder / 'batches.db'}", f"--response-file={folder / 'responses.db'}")
    one = Stack(folder, f"--model={model}", *kept)
    with running(one):
        yield one
