"""The tests run on a user's cluster as on a local one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kube.cluster import Cluster
from tests.kube.user_cluster import MAY_USE_VARIABLE, current_context

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_tests_run_on_a_users_cluster(local_cluster: Cluster) -> None:
    """The local one plays the user's: reached by its kubeconfig alone, with images that are there already."""
    theirs = local_cluster.kubeconfig
    environ = {**os.environ, "KUBECONFIG": str(theirs), MAY_USE_VARIABLE: current_context(theirs)}
    tests = ("test_openai_client", "test_pods_run_as_promised", "test_killed_worker_fails_no_request")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-m", "kube", "tests/kube/test_release.py", "-k", " or ".join(tests)],
        cwd=ROOT, env=environ, capture_output=True, text=True, check=False, timeout=800,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    assert "2 passed, 2 skipped" in done.stdout, "what only a local cluster allows is left out"
    left = local_cluster.kubectl("get", "namespaces", "-o", "name")
    assert "namespace/baton-tests" not in left, "the namespace goes, too"
