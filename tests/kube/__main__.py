"""Runs the tests that need a cluster: `python -m tests.kube [--full]`.

Where KUBECONFIG names a cluster it asks before it touches that; otherwise it starts a local one. Without --full it
leaves out what takes long, and says so.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.kube.user_cluster import MAY_USE_VARIABLE, current_context


def main() -> int:
    full = "--full" in sys.argv[1:]
    kubeconfig = os.environ.get("KUBECONFIG")
    if kubeconfig and MAY_USE_VARIABLE not in os.environ:
        context = current_context(Path(kubeconfig))
        question = f"Install Baton in namespaces of its own on {context}, test it, and remove it again? [y/N] "
        if sys.stdin.isatty() and input(question).strip().lower() in ("y", "yes"):
            os.environ[MAY_USE_VARIABLE] = context
        else:
            print(f"left alone: {context}; a local cluster is used instead", file=sys.stderr)
    chosen = "kube" if full else "kube and not slow"
    if not full:
        print("left out: what is marked slow; make test-kube-full runs it too", file=sys.stderr)
    return pytest.main(["-m", chosen, str(Path(__file__).parents[1]), *(a for a in sys.argv[1:] if a != "--full")])


if __name__ == "__main__":
    sys.exit(main())
