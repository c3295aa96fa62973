"""`make test-kube` leaves the cluster that KUBECONFIG names alone unless its user says yes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.kube.user_cluster import MAY_USE_VARIABLE, allowed_cluster, ask_to_use, current_context


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


def test_left_alone_if_nobody_can_be_asked(kubeconfig: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert ask_to_use(kubeconfig, None) == ""
    assert "left alone: precious at https://127.0.0.1:1; a local cluster is used" in capsys.readouterr().err


def test_unused_without_a_yes(kubeconfig: Path) -> None:
    assert allowed_cluster({"KUBECONFIG": str(kubeconfig)}) is None
    assert allowed_cluster({"KUBECONFIG": str(kubeconfig), MAY_USE_VARIABLE: ""}) is None


def test_a_yes_is_for_one_cluster(kubeconfig: Path) -> None:
    """KUBECONFIG may have moved on since."""
    with pytest.raises(RuntimeError, match="KUBECONFIG selects 'precious"):
        allowed_cluster({"KUBECONFIG": str(kubeconfig), MAY_USE_VARIABLE: "other at https://127.0.0.1:2"})
