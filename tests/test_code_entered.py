"""The tool that counts what code a decode step and a chat enter."""

from __future__ import annotations

from pathlib import Path

from tools.code_entered import MODEL, decode_step, tracing

MODULE = '''\
def outer():
    """Counts with its docstring."""

    def inner():
        return 1

    return inner()


def other():
    return 2
'''


def test_functions_count_once_with_all_their_lines(tmp_path: Path) -> None:
    path = tmp_path / "package" / "module.py"
    namespace: dict[str, object] = {}
    exec(compile(MODULE, path, "exec"), namespace)
    outer, other = namespace["outer"], namespace["other"]
    assert callable(outer)
    assert callable(other)
    with tracing(tmp_path, ()) as entered:
        outer()
        outer()
    assert entered.lines_by_file() == {"package/module.py": 7}
    assert sorted(code.co_name for code in entered.functions) == ["inner", "outer"]
    assert entered.without(("package/",)).lines_by_file() == {}
    with tracing(tmp_path, ()) as both:
        outer()
        other()
    assert both.within(entered).functions == entered.functions
    with tracing(tmp_path, ("package/",)) as nothing:
        outer()
    assert nothing.lines_by_file() == {}


MOST_LINES, MOST_FILES = 600, 20


def test_a_decode_step_enters_the_scheduler_and_the_model_and_little_else() -> None:
    """If this fails since lines were added: what a plain decode never needs belongs behind a test that it fails."""
    step = decode_step()
    without_model = step.without(MODEL).lines_by_file()
    assert sum(without_model.values()) <= MOST_LINES
    assert len(without_model) <= MOST_FILES
    files = step.lines_by_file()
    assert {"engine/core.py", "engine/scheduling/scheduler.py", "engine/models/decoder.py"} <= files.keys()
    assert not any(file.startswith(("tests/", "tools/", "router/")) for file in files)
    assert not any(file.startswith("engine/models/") for file in step.without(MODEL).lines_by_file())
