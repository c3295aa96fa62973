"""Makes docs/faults.md from the fault matrix: `python -m tools.faults_page --write`; without, whether it is current."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from tests.faults.matrix import CONNECTORS, FAULTS, MOMENTS, Cell, End, Fault, Moment, Outcome, Process, expected
from tools.generated import main

PATH = Path(__file__).resolve().parents[1] / "docs" / "faults.md"

_HEAD = """\
# Faults

What becomes of a request when something goes wrong while it is under way: each process, at each moment, by each fault.
The tables are written from the one that the tests check, with real processes, cell by cell
([`tests/faults`](../tests/faults)); `make test-faults` runs them all, `make test-slow` a few, and `make chaos` mixes
faults at random under load. With `FAULTS_ROUTERS=3` three routers share the workers, and each cell asks the next one.
With `FAULTS_QUEUE_POLICY=slo` or `auto`, and `CHAOS_QUEUE_POLICY`, workers know how long steps take, and requests have
[latency targets](latency-targets.md). With `FAULTS_ROLE_SHIFTS=1` all workers have both roles, others take prompts in
each cell, and the two that have the request change places at its moment, so that the fault strikes in
mid-[shift](roles.md). Two cells of `make test-slow`, a prefill and a decode worker that are killed, are tried with
targets and shifts. With `CHAOS_ROLE_SHIFTS=1` workers of both roles take work of another one each second. With
`FAULTS_RANKS=2` or `CHAOS_RANKS=2` two processes compute the model of each worker; where the tables name a rank, they
always do. With `FAULTS_SIXTH=1` (to 6) `make test-faults` runs a sixth of the cells: each fault of each process once,
and together every moment.
[architecture.md](architecture.md) says how each is noticed.

After every cell, whatever it was:

- every block of every living worker is free or cached again, and no lease is left, at the latest a keepalive interval
  (5 s within the fleet, 20 s for a client that vanished: [`common/grpc/options.py`](../common/grpc/options.py)) and a
  transfer's timeout after the fault, while it lasts (with nixl 3 s more:
  [the end of a lease](kv-plane.md#the-end-of-a-lease));
- `check_integrity()` holds on every worker;
- the next request gets the right answer;
- what happened was counted if the table says so, and nothing else was; a log line with the request's id tells of it.

"""

_KEY = """\
**Same answer**: the client gets the tokens that it would have got, none twice and none missing. In brackets is what it
took, in the answer's report and in the metrics; with a question mark if it depends on what was quicker:

| word | what happened | metric |
| --- | --- | --- |
| retry | another decode worker, before the first token | `baton_router_retries_total` |
| migration | another decode worker, after the first token | `baton_router_migrations_total` |
| prefill retry | a prefill worker failed; another one is asked, if in time | `baton_worker_prefill_failures_total` |
| fallback | the decode worker computed the rest of the prompt itself | `baton_router_fallbacks_total` |
| blocks lost | blocks that were to be fetched did not arrive | `baton_worker_kv_blocks_lost_total` |
| cancelled, deadline | the request ended early | `baton_router_requests_total{outcome}` |

**Nothing more**: there is no client left to answer. **DEADLINE_EXCEEDED** (over REST: 504, or an error event of type
`timeout_error`) and **UNAVAILABLE** are the status that the client gets; after UNAVAILABLE it may ask again, at another
router. A dash is a cell that cannot be, for the reason below its table.

Cuts are tested in three ways: the link goes down, or the packets of one direction only are dropped. (If only what a
worker should receive is dropped, what it sends still arrives, and may be all that is needed: nothing is counted then.)
A router that hangs or is cut off is given up by its workers after the keepalive interval, and a gRPC client by its
router after 20 s, not before; an answer that is complete by then is delivered when it comes back. HTTP/1.1 has no
pings: a REST client is given up 30 s after its host was last heard of
([`router/api/rest/http/listener.py`](../router/api/rest/http/listener.py)), and one that hangs goes on being answered
until it has taken nothing for as long. A hung engine is ended by its front after `--engine-timeout`.

With `lmcache` nothing is cut: its server and the workers share one host's memory. If it has no line of its own, what
holds for a store holds for it.

Every cell is run with `shared_storage`. With the others those are in which it matters how blocks travel; what happens
in the rest does not depend on it. With `nixl`: between chunks, in mid-transfer and after the first token, and for the
prefill worker's processes at every moment. (Not the client's deadline between chunks: the test would hold the producer
for so long that UCX may [end it](kv-plane.md#a-connection-that-breaks-in-mid-transfer-over-tcp).) With `lmcache`: at
the same three moments, and for its server at every one.

A prefill worker that reads [what decode lends](kv-plane.md#what-decode-lends) has two moments more: it has asked for
the blocks, and they are lent. At both, with `nixl`, a SIGKILL or SIGSTOP of either worker gives the same answer after a
retry, and whoever lives is free of the loan ([tests](../tests/integration/test_lost_lenders.py)). They are no column
below: only the second turn of a conversation has them.

"""


def text() -> str:
    moments = _list((moment.value, words) for moment, words in MOMENTS.items())
    faults = _list((fault.value, words) for fault, words in FAULTS.items())
    parts = [_HEAD, "## Moments\n\n", moments, "\n## Faults\n\n", faults, "\n## Outcomes\n\n", _KEY]
    parts += [_section(process) for process in Process if process is not Process.STORE]
    parts += [_section(Process.STORE)]
    return "".join(parts).rstrip() + "\n"


def _list(items: Iterable[tuple[str, str]]) -> str:
    return "".join(f"- **{name}**: {words}\n" for name, words in items)


def _section(process: Process) -> str:
    head = ["fault", *(moment.value for moment in Moment)]
    lines = [f"### {process.value.capitalize()}\n", _line(head), _line(["---"] * len(head))]
    reasons: dict[str, list[str]] = {}
    for fault in Fault:
        outcomes = {connector: _row(process, fault, connector) for connector in CONNECTORS}
        stored = outcomes["shared_storage"]
        for connector, found in outcomes.items():
            for outcome in found if connector == "shared_storage" or process is Process.STORE else []:
                if outcome.end is End.NOT_POSSIBLE and fault.value not in reasons.setdefault(outcome.why, []):
                    reasons[outcome.why].append(fault.value)
            if all(outcome.end is End.NOT_POSSIBLE for outcome in found):
                continue
            if connector == "shared_storage":
                lines.append(_line([fault.value, *(outcome.words() for outcome in stored)]))
            elif found != stored:
                lines.append(_line([f"{fault.value}, with {connector}", *(outcome.words() for outcome in found)]))
    lines.append("")
    lines += [f"- {', '.join(faults)}: {why}." for why, faults in reasons.items()]
    return "\n".join(lines) + ("\n\n" if reasons else "\n")


def _row(process: Process, fault: Fault, connector: str) -> list[Outcome]:
    return [expected(Cell(process, moment, fault), connector) for moment in Moment]


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main("tools.faults_page", __doc__, PATH, text()))
