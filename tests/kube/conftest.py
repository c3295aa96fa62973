"""Clusters that the tests share: made at the first test that needs one, or skipped with the reason why not."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kube import cluster as local
from tests.kube import control_plane as alone
from tests.kube import images
from tests.kube.cluster import Cluster
from tests.kube.control_plane import ControlPlane
from tests.kube.release import Release
from tests.kube.user_cluster import UserCluster, allowed_cluster

CRDS_VARIABLE = "KUBE_CRDS"


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane without a node; needs no root."""
    if reason := alone.why_not():
        pytest.skip(reason)
    with ControlPlane(tmp_path_factory.mktemp("control-plane")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def crds() -> Path:
    """Custom resource definitions of KEDA, LeaderWorkerSet, Prometheus operator, cert-manager, Gateway API."""
    folder = os.environ.get(CRDS_VARIABLE)
    if not folder:
        pytest.skip(f"{CRDS_VARIABLE} names no folder of custom resource definitions")
    return Path(folder)


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster | UserCluster]:
    """A cluster that runs pods, with Baton's images on its node: the user's if they allowed it, else a local one."""
    if (theirs := allowed_cluster(os.environ)) is not None:
        yield theirs
        theirs.close()
        return
    if reason := local.why_not() or images.why_not():
        pytest.skip(reason)
    archives = [images.archive(name) for name in ("router", "cpu")]
    with Cluster(tmp_path_factory.mktemp("cluster"), images.FOLDER / "node") as ours:
        for archive in archives:
            ours.load_image(archive)
        yield ours


@pytest.fixture(scope="session")
def local_cluster(cluster: Cluster | UserCluster) -> Cluster:
    """For tests that do what nobody may do to a user's cluster: kill containers, the kubelet, the API server."""
    if not isinstance(cluster, Cluster):
        pytest.skip("runs on a local cluster only")
    return cluster


@pytest.fixture(scope="module")
def ports(cluster: Cluster | UserCluster, release: Release) -> tuple[int, int]:
    """REST and gRPC of the router's Service, on 127.0.0.1. `release` is the module's own."""
    service = f"{release.name}-router.{release.namespace}"
    return cluster.forward(service, 8000), cluster.forward(service, 50051)
