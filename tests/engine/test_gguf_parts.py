"""A GGUF model that was cut into parts is read from any of them, or from their folder."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import pytest

from common.errors import StartupError
from common.model_files import model_identity, open_model
from engine.loading.embedded_model import ensure_model, find_model
from engine.local.memory import weight_bytes
from tests.engine.gguf_files import Type, Written, write_gguf
from tests.engine.test_model_families import check
from tests.engine.tiny_models import advance, make_runner, random_sequences


def silent(line: str) -> None:
    raise AssertionError(line)


@pytest.fixture
def written(tmp_path: Path) -> Written:
    result = write_gguf(tmp_path / "model", "llama", (Type.Q8_0, Type.F32), part_tensors=12)
    assert len(parts(result)) == 3
    return result


def parts(written: Written) -> list[Path]:
    return sorted(written.file.parent.glob("*.gguf"))


def refusal(model: Path, cache: Path) -> str:
    with pytest.raises(StartupError) as caught:
        ensure_model(str(model), str(cache), lambda line: None)
    return caught.value.message


def test_any_part_and_the_folder_are_the_model(written: Written, tmp_path: Path) -> None:
    cache = str(tmp_path / "cache")
    path = ensure_model(str(written.file), cache, lambda line: None)
    for name in (*parts(written), written.file.parent):
        assert ensure_model(str(name), cache, silent) == path
    files = open_model(path)
    assert files.is_gguf
    assert files.weight_files == tuple(parts(written))
    assert len(model_identity(path)) == 32
    whole = write_gguf(tmp_path / "whole", "llama", (Type.Q8_0, Type.F32))
    whole_path = ensure_model(str(whole.file), cache, lambda line: None)
    assert weight_bytes(files, 4) == weight_bytes(open_model(whole_path), 4)
    (sequence,) = random_sequences([30])
    advance(make_runner(path), [sequence], [30])
    check(written.reference, sequence)


def test_parts_behind_links(written: Written, tmp_path: Path) -> None:
    """As the cache of a hub has them: links of the parts' names to files of other names."""
    links = tmp_path / "links"
    links.mkdir()
    for number, part in enumerate(parts(written)):
        (links / part.name).symlink_to(part.rename(tmp_path / f"blob-{number}"))
    path = ensure_model(str(links), str(tmp_path / "cache"), lambda line: None)
    (sequence,) = random_sequences([9])
    advance(make_runner(path), [sequence], [9])
    check(written.reference, sequence)


def test_a_missing_part_is_named(written: Written, tmp_path: Path) -> None:
    path = ensure_model(str(written.file), str(tmp_path / "cache"), lambda line: None)
    second = parts(written)[1]
    second.unlink()
    for model in (written.file, written.file.parent, second):
        assert f"of which {second.name} is missing in {second.parent}" in refusal(model, tmp_path)
    with pytest.raises(StartupError, match=re.escape(f"{second.name} is missing")):
        open_model(path)


def test_a_part_under_the_name_of_another_is_named(written: Written, tmp_path: Path) -> None:
    first, second, third = parts(written)
    second.rename(tmp_path / "second")
    third.rename(second)
    (tmp_path / "second").rename(third)
    assert f"{second} is part 3 of 3" in refusal(first, tmp_path)


def test_a_changed_part_is_another_model(written: Written, tmp_path: Path) -> None:
    path = ensure_model(str(written.file), str(tmp_path), lambda line: None)
    last = parts(written)[-1]
    content = bytearray(last.read_bytes())
    content[-1] ^= 1
    last.write_bytes(content)
    assert find_model(str(written.file), str(tmp_path)) is None
    assert model_identity(ensure_model(str(written.file), str(tmp_path), lambda line: None)) == model_identity(path)


def test_a_folder_of_several_models_is_refused(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
    assert "holds several GGUF models (a.gguf, b.gguf); give --model one file" in refusal(tmp_path, tmp_path / "cache")
