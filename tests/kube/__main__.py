"""Runs the tests that need a cluster: `python -m tests.kube [--full] [pytest's arguments]`.

If KUBECONFIG names a cluster, it asks before it touches that; otherwise it starts a local one. Without --full it
leaves out what takes long, and says what.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.kube import cluster, images
from tests.kube.user_cluster import MAY_USE_VARIABLE, ask_to_use

TESTS = Path(__file__).parent
LEFT_OUT = """left to make test-kube-full:
  upgrade, rollback, deleted workers and routers, a restarted API server, under load                   test_release.py
  pods of the release before, replaced under load                                               test_rolling_update.py
  memory that runs out, a silent kubelet, lost pods, killed routers, under load                         test_faults.py
  a second node: drained, and lost, under load                                                           test_nodes.py
  workers of both roles                                                                                   test_both.py
  what a local cluster leaves on the machine                                                           test_cluster.py
  HPAs on Baton's own metrics; the planner behind them                         test_scaling.py, test_follow_planner.py
  the autoscaler's leader                                                                               test_leader.py
  KEDA's operator, to and from zero                                                                       test_keda.py
  groups of LeaderWorkerSet                                                                                test_lws.py
  KV on a claim; LMCache in the pods, Redis behind them                                                  test_tiers.py
  every permission in use, and missed when it is taken away                                        test_permissions.py
  TLS on every hop, API keys                                                         test_secured.py, test_security.py
  a user's cluster                                                                                test_user_cluster.py
"""


def main() -> int:
    arguments = [argument for argument in sys.argv[1:] if argument != "--full"]
    full = len(arguments) < len(sys.argv) - 1
    kubeconfig = os.environ.get("KUBECONFIG")
    if kubeconfig and MAY_USE_VARIABLE not in os.environ:
        os.environ[MAY_USE_VARIABLE] = ask_to_use(Path(kubeconfig), input if sys.stdin.isatty() else None)
    elif not kubeconfig and not (cluster.why_not() or images.why_not()):
        for name in ("router", "cpu"):  # here, since no test's time limit is meant for that
            print(f"image baton-{name}: it takes minutes if it has not been built here before", flush=True)
            images.archive(name)
    status = pytest.main(["-m", "kube" if full else "kube and not slow", str(TESTS), *arguments])
    if not full:
        print(LEFT_OUT, end="", file=sys.stderr)
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
