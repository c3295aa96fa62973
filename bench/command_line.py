"""What the commands of `baton bench` have in common."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable

import click

from common.errors import BatonError, ConfigError


def names(known: tuple[str, ...]) -> Callable[[click.Context, click.Parameter, str | None], tuple[str, ...]]:
    """The callback of an option that takes names of `known` with commas between: all of them if it is not given and has
    no default."""

    def check(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[str, ...]:  # noqa: ARG001
        given = known if value is None else tuple(name.strip() for name in value.split(",") if name.strip())
        for name in given:
            if name not in known:
                raise click.BadParameter(f"{name!r} is not one of {', '.join(known)}")
        return given

    return check


def outcome(command: str, run: Callable[[], int]) -> int:
    """The exit code of `run`. Signals end it as Ctrl-C does."""
    # Ctrl-C, too: a shell that starts a command in the background has it ignore that.
    before = {signum: signal.signal(signum, _interrupt) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        return run()
    except BatonError as error:
        print(f"baton bench {command}: error: {' '.join(error.message.split())}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _interrupt(signum: int, frame: object) -> None:  # noqa: ARG001
    raise KeyboardInterrupt  # every process that was started is ended on the way out
