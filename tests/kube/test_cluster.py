"""What a local cluster leaves on the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.kube import cluster as local
from tests.kube.cluster import NODE, Cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

# Where containerd, CNI plugins and kubelets leave a trace of each pod, whatever their settings are.
FOLDERS = ("/run/netns", "/var/lib/cni", "/var/log/containers")


def _traces() -> set[Path]:
    return {path for folder in FOLDERS for path in Path(folder).rglob("*")} | _cgroups()


def _cgroups() -> set[Path]:
    """Of nodes: directly below the root in version 2, below each controller in version 1."""
    return {
        path for pattern in (f"baton-{NODE}-*", f"*/baton-{NODE}-*") for path in Path("/sys/fs/cgroup").glob(pattern)
    }


def test_nothing_is_left_of_it(tmp_path: Path) -> None:
    """Its pods ran: one resolves names."""
    if reason := local.why_not():
        pytest.skip(reason)
    before = _traces()
    with Cluster(tmp_path):
        assert _cgroups() - before, "they are what there is to leave"
    assert _traces() - before == set()
