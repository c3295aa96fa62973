"""The `baton` command: which commands there are, and how they fail.

Exit codes: 0 done, 1 it did not work (one line says why), 2 it was asked wrongly, 130 Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points

import click

from baton.cli.admin import ADMIN
from baton.cli.ask import ASK_COMMANDS
from baton.cli.doctor import DOCTOR
from baton.cli.options import print_error
from baton.cli.profile import PROFILE
from baton.cli.replay import REPLAY
from baton.cli.serve import SERVE_COMMANDS
from baton.cli.simulate import SIMULATE
from baton.cli.top import TOP
from baton.cli.tune import TUNE

ENTRY_POINTS = "baton.commands"


def _show_help() -> None:
    ctx = click.get_current_context()
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


class _Group(click.Group):
    """The commands below, and those that installed packages add as entry points of group `baton.commands`: what lies
    above this package, as benchmarks do, is only imported when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*super().list_commands(ctx), *sorted(entry_points(group=ENTRY_POINTS).names)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = super().get_command(ctx, cmd_name)
        if command is not None:
            return command
        for point in entry_points(group=ENTRY_POINTS, name=cmd_name):
            added: click.Command = point.load()
            return added
        return None


GROUP = _Group(
    "baton",
    callback=_show_help,
    invoke_without_command=True,
    help="Serves large language models with prefill and decode on separate workers.\n\n"
    "\b\n"
    "  baton up                      a whole stack on this machine\n"
    '  baton chat "Hello!"           ask it\n'
    "  baton doctor                  what this machine has, and lacks\n"
    "  baton COMMAND --help          everything a command can be told",
    commands={
        command.name or "": command
        for command in (*SERVE_COMMANDS, *ASK_COMMANDS, TOP, ADMIN, DOCTOR, PROFILE, REPLAY, SIMULATE, TUNE)
    },
)


click.version_option(package_name="baton-serve", prog_name="baton", message="%(prog)s %(version)s")(GROUP)


def main(arguments: Sequence[str] | None = None) -> int:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its C core repeats on standard error what its exceptions say
    try:
        code = GROUP.main(arguments, prog_name="baton", standalone_mode=False)
        sys.stdout.flush()
    except click.UsageError as error:
        print_error(error.ctx.command_path if error.ctx else "baton", error.format_message())
        return 2
    except click.ClickException as error:
        print_error("baton", error.format_message())
        return 1
    except (KeyboardInterrupt, click.Abort):
        return 130
    except BrokenPipeError:  # `baton status | head`: nothing is left to say, and nobody to say it to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return code if isinstance(code, int) else 0
