"""The `baton` command as a user types it: help, exit codes, one-line errors."""

from __future__ import annotations

import subprocess
import sys

import pytest

from baton.cli.main import GROUP, main
from baton.settings import SETTINGS, env_name, flag_name


def test_every_command_has_its_settings_and_the_other_way_round() -> None:
    assert set(GROUP.commands) == set(SETTINGS)


@pytest.mark.parametrize("command", sorted(SETTINGS))
def test_help_has_every_field(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    words = " ".join(capsys.readouterr().out.split())
    for field, info in SETTINGS[command].model_fields.items():
        assert f"{flag_name(field)} " in words
        assert env_name(field) in words
        assert info.description
        assert " ".join(info.description.split()) in words.replace("- ", "-")
    assert f"baton {command}" in words.partition("Examples:")[2]
    assert "--config FILE" in words


def test_help_shows_choices_and_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    main(["up", "--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "--dtype auto|bfloat16|float32|float16" in words
    assert "[BATON_HTTP_PORT; default: 8000]" in words
    assert "--enable-prefix-caching / --no-enable-prefix-caching" in words
    assert "[BATON_NUM_BLOCKS; default: unset]" in words


def test_no_command_shows_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "Runs one decode worker." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["up", "--conector", "x"], "baton up: error: No such option '--conector'. Did you mean '--connector'?"),
        (["up", "--num-blocks", "none"], "baton up: error: --num-blocks: "),
        (["up", "--connector", "shared_storag"], "did you mean shared_storage?"),
        (["up", "--decode", "0"], "baton up: error: --decode: a stack needs at least one decode worker"),
        (["staus"], "Did you mean 'status'?"),
        (["generate"], "baton generate: error: Missing argument 'PROMPT'."),
        (["chat", "--top-k", "many", "hi"], "baton chat: error: --top-k: should be a valid integer"),
    ],
)
def test_asked_wrongly_is_one_line_and_exit_code_2(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    output = capsys.readouterr()
    assert line in output.err
    assert output.err.count("\n") == 1
    assert output.out == ""


@pytest.mark.parametrize("command", [["status"], ["chat", "hi"], ["generate", "hi"], ["models"]])
def test_no_router_is_one_line_and_exit_code_1(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command, "--router", "127.0.0.1:1"]) == 1
    error = capsys.readouterr().err
    assert error == f"baton {command[0]}: error: no router answers at 127.0.0.1:1 (`baton up` starts a stack)\n"


def test_unknown_variable_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("BATON_NUMBLOCKS", "1")
    assert main(["status"]) == 2
    assert capsys.readouterr().err == (
        "baton status: error: BATON_NUMBLOCKS: no such setting, did you mean BATON_NUM_BLOCKS?\n"
    )


def test_help_and_version_load_nothing_heavy() -> None:
    code = (
        "import sys; from baton.cli.main import main; assert main(['up', '--help']) == 0; "
        "heavy = {'torch', 'grpc', 'transformers', 'numpy', 'fastapi', 'rich'} & set(sys.modules); "
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_python_dash_m_is_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "baton", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("baton ")
