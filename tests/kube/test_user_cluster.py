"""A cluster that KUBECONFIG names: left alone unless its user says yes, and then used for these tests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kube.cluster import Cluster
from tests.kube.user_cluster import MAY_USE_VARIABLE, allowed_cluster, ask_to_use, current_context

ROOT = Path(__file__).parents[2]


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Path:
    """Names a cluster that nobody answers for."""
    path = tmp_path / "theirs.kubeconfig"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "theirs", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "me", "user": {"token": "none"}}],
        "contexts": [{"name": "precious", "context": {"cluster": "theirs", "user": "me"}}],
        "current-context": "precious",
    }
    path.write_text(json.dumps(document))
    return path


def test_context_is_shown_with_its_server(kubeconfig: Path) -> None:
    assert current_context(kubeconfig) == "precious at https://127.0.0.1:1"


@pytest.mark.parametrize(("answer", "allowed"), [("n", False), ("", False), ("y", True), ("Yes", True), ("yy", False)])
def test_asks_before_it_touches_the_cluster(
    kubeconfig: Path, capsys: pytest.CaptureFixture[str], answer: str, allowed: bool
) -> None:
    questions: list[str] = []

    def user(question: str) -> str:
        questions.append(question)
        return f"{answer}\n"

    assert ask_to_use(kubeconfig, user) == ("precious at https://127.0.0.1:1" if allowed else "")
    assert ["precious at https://127.0.0.1:1" in question for question in questions] == [True]
    assert ("left alone: precious" in capsys.readouterr().err) == (not allowed)


def test_left_alone_where_nobody_can_be_asked(kubeconfig: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask_to_use(kubeconfig, None) == ""
    assert "left alone: precious at https://127.0.0.1:1; a local cluster is used" in capsys.readouterr().err


def test_unused_without_a_yes(kubeconfig: Path) -> None:
    assert allowed_cluster({"KUBECONFIG": str(kubeconfig)}) is None
    assert allowed_cluster({"KUBECONFIG": str(kubeconfig), MAY_USE_VARIABLE: ""}) is None


def test_a_yes_is_for_one_cluster(kubeconfig: Path) -> None:
    """KUBECONFIG may have moved on since."""
    with pytest.raises(RuntimeError, match="KUBECONFIG selects 'precious"):
        allowed_cluster({"KUBECONFIG": str(kubeconfig), MAY_USE_VARIABLE: "other at https://127.0.0.1:2"})


@pytest.mark.kube
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
