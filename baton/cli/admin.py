"""`baton admin`: orders of operators to a running router and its workers."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import click

from baton.cli.ask import connect
from baton.cli.options import AS_JSON, SettingsCommand
from baton.cli.profile_worker import MAX_SECONDS, MAX_STEPS, write_profile
from common.config import ClientSettings
from common.errors import ConfigError
from common.types import WorkerRole

if TYPE_CHECKING:
    from baton.client.admin import OrderResult, Target
    from baton.client.sync_client import Client

ORDERS = ("state", "drain", "pause", "resume", "roles", "abort", "flush", "log-level", "reload", "profile")
ROLES = ("prefill", "decode", "both", "auto")
WITH_WHAT = {
    "abort": "the id of a request",
    "log-level": "debug, info, warning or error",
    "roles": "prefill, decode, both, or auto, which leaves it to planners",
}
OF_ONE_WORKER = ("drain", "profile")
OF_WORKERS = (*OF_ONE_WORKER, "flush", "roles")
WITH_TARGET = (*OF_WORKERS, "pause", "resume", "log-level")


@dataclasses.dataclass(slots=True, frozen=True, kw_only=True)
class Asked:
    """What the command line says, beside the settings."""

    order: str
    what: str
    target: Target
    seconds: float | None
    steps: int | None
    out: str | None
    as_json: bool


def admin(
    settings: ClientSettings,
    *,
    order: str,
    what: str | None,
    worker: str | None,
    all_workers: bool,
    this_router: bool,
    everything: bool,
    seconds: float | None,
    steps: int | None,
    out: str | None,
    as_json: bool,
) -> int:
    """Returns 1 if an order was not carried out everywhere."""
    from baton.client.admin import Target

    targets = {
        "--worker": bool(worker),
        "--all-workers": all_workers,
        "--this-router": this_router,
        "--all": everything,
    }
    _check(order, what, [name for name, is_set in targets.items() if is_set])
    if seconds is not None and order not in OF_ONE_WORKER:
        raise ConfigError("--seconds", f"is for {' and '.join(OF_ONE_WORKER)}")
    if (steps is not None or out is not None) and order != "profile":
        raise ConfigError("--steps" if steps is not None else "--out", "is for profile")
    target = Target(worker=worker or "", all_workers=all_workers, router=this_router, all=everything)
    asked = Asked(order=order, what=what or "", target=target, seconds=seconds, steps=steps, out=out, as_json=as_json)
    with connect(settings) as client:
        return _carry_out(client, asked)


def _check(order: str, what: str | None, targets: Sequence[str]) -> None:
    """Raises `ConfigError`."""
    if order in WITH_WHAT and what is None:
        raise ConfigError("WHAT", f"is missing: {WITH_WHAT[order]}")
    if order == "roles" and what not in ROLES:
        raise ConfigError("WHAT", f"{what!r} is none of {', '.join(ROLES)}")
    if order not in WITH_WHAT and what is not None:
        raise ConfigError("WHAT", f"is for {' and '.join(WITH_WHAT)}")
    if order not in WITH_TARGET:
        if targets:
            raise ConfigError(targets[0], f"is not for {order}")
        return
    allowed = ["--worker", "--all-workers", "--this-router", "--all"]
    if order in OF_WORKERS:
        allowed = allowed[: 1 if order in OF_ONE_WORKER else 2]
    if wrong := [name for name in targets if name not in allowed]:
        raise ConfigError(wrong[0], f"is not for {order}")
    if len(targets) != 1:
        raise ConfigError(
            " or ".join(allowed), f"{'is missing' if not targets else 'only one of them'}: whom {order} is for"
        )


def _carry_out(client: Client, asked: Asked) -> int:
    orders, target = client.admin, asked.target
    match asked.order:
        case "state":
            return _show_state(client, as_json=asked.as_json)
        case "drain":
            orders.drain(target.worker, asked.seconds)
            print(f"{target.worker}: drains, and ends then")
            return 0
        case "pause":
            return _show(orders.pause(target), asked, lambda one: f"paused, {one.num_running} go on")
        case "resume":
            return _show(orders.resume(target), asked, lambda _: "takes work again")
        case "roles":
            role = None if asked.what == "auto" else WorkerRole(asked.what)
            words = f"takes {role.value} work, pinned" if role else "takes work of both roles, as planners see fit"
            return _show(orders.set_role(role, target), asked, lambda one: f"{words}; {one.num_running} go on")
        case "flush":
            return _show(
                orders.flush_cache(target),
                asked,
                lambda one: (
                    f"forgot {one.num_device_blocks} blocks of its device, {one.num_host_blocks} of host memory"
                ),
            )
        case "log-level":
            return _show(orders.set_log_level(asked.what, target), asked, lambda _: f"log level {asked.what}")
        case "abort":
            return _show_aborted(client, asked)
        case "reload":
            return _show_files(client, as_json=asked.as_json)
    taken = orders.profile_worker(target.worker, num_steps=asked.steps or 0, timeout_s=asked.seconds or 0.0)
    return write_profile(taken, target.worker, asked.out)


def _show(results: Sequence[OrderResult], asked: Asked, words: Callable[[OrderResult], str]) -> int:
    if asked.as_json:
        print(json.dumps({"results": [dataclasses.asdict(one) for one in results]}))
    else:
        for one in results:
            place = one.address or "router"
            print(f"{place}: {one.error or words(one)}", file=sys.stderr if one.error else sys.stdout)
    return 1 if any(one.error for one in results) else 0


def _show_state(client: Client, *, as_json: bool) -> int:
    state = client.admin.state()
    if as_json:
        print(json.dumps(dataclasses.asdict(state)))
        return 0
    router = state.router
    takes = "paused" if router.paused else "takes requests"
    processes = f"{router.num_processes} process{'' if router.num_processes == 1 else 'es'}"
    print(f"router: {takes}, {router.num_requests} run, {processes}, log level {router.log_level}")
    for one in state.workers:
        role, standing = one.role or "?", one.state or "?"
        if one.takes not in (None, one.role) or one.role_pinned:
            role += f" (takes {one.takes or '?'}{', pinned' if one.role_pinned else ''})"
        print(f"{one.address}: {role}, {standing}, {one.num_requests_running} run, {one.num_requests_waiting} wait")
    return 0


def _show_aborted(client: Client, asked: Asked) -> int:
    aborted = client.admin.abort(asked.what)
    if asked.as_json:
        print(json.dumps(dataclasses.asdict(aborted)))
    else:
        where = f" on {', '.join(aborted.workers)}" if aborted.workers else ""
        print(f"{asked.what}: {aborted.num_requests} ended{where}")
        for one in aborted.failures:
            print(f"{one.address}: {one.error}", file=sys.stderr)
    return 1 if aborted.failures else 0


def _show_files(client: Client, *, as_json: bool) -> int:
    files = client.admin.reload()
    if as_json:
        print(json.dumps({"files": [dataclasses.asdict(one) for one in files]}))
    elif not files:
        print("the router has no files to read again")
    else:
        for one in files:
            read_at = datetime.fromtimestamp(one.read_at, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            print(f"{one.what}: {one.path}, as read at {read_at}")
            if one.error:
                print(f"{one.what}: cannot be used now: {one.error}", file=sys.stderr)
    return 1 if any(one.error for one in files) else 0


ADMIN = SettingsCommand(
    "admin",
    ClientSettings,
    admin,
    about="Orders of operators: drain, pause, roles, abort, flush caches, log levels, reload, profile.",
    examples=[
        "baton admin state",
        "baton admin pause --worker 10.0.0.5:50061",
        "baton admin resume --all-workers",
        "baton admin drain --worker 10.0.0.5:50061 --seconds 60",
        "baton admin roles prefill --worker 10.0.0.5:50061",
        "baton admin roles auto --all-workers",
        "baton admin abort my-request-7",
        "baton admin flush --all-workers",
        "baton admin log-level debug --all",
        "baton admin reload",
        "baton admin profile --worker 10.0.0.5:50061 --steps 50 --out profiles",
    ],
    params=[
        click.Argument(["order"], type=click.Choice(ORDERS)),
        click.Argument(["what"], required=False),
        click.Option(
            ["--worker"], metavar="ADDRESS", help="The order is for this worker (`baton admin state` lists them)."
        ),
        click.Option(["--all-workers"], is_flag=True, help="The order is for all workers of the router."),
        click.Option(
            ["--this-router"], is_flag=True, help="The order is for the router that is asked, and no replica."
        ),
        click.Option(["--all", "everything"], is_flag=True, help="The order is for that router and all workers."),
        click.Option(
            ["--seconds"],
            type=click.FloatRange(min=0),
            help=f"drain: how long it may take; profile: to wait for the steps, {MAX_SECONDS:g} at most.",
        ),
        click.Option(["--steps"], type=click.IntRange(1, MAX_STEPS), help="profile: of the engine; 20 if unset."),
        click.Option(["--out"], metavar="FOLDER", help="profile: where files are written; here if unset."),
        AS_JSON,
    ],
)
