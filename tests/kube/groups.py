"""Groups of pods that LeaderWorkerSet makes, each of which is one worker."""

from __future__ import annotations

from tests.kube.processes import wait_until
from tests.kube.release import Release, is_ready

INDEX, GROUP = "leaderworkerset.sigs.k8s.io/worker-index", "leaderworkerset.sigs.k8s.io/group-index"
SIZE = 2  # pods of each
MULTI_NODE = {"enabled": True, "size": SIZE}  # the chart's value


def ready_groups(release: Release) -> dict[str, dict[str, str]]:
    """UIDs of ready pods of decode workers, by group and place in it."""
    groups: dict[str, dict[str, str]] = {}
    for pod in release.pods("decode"):
        labels = pod["metadata"]["labels"]
        if is_ready(pod):
            groups.setdefault(labels[GROUP], {})[labels[INDEX]] = pod["metadata"]["uid"]
    return groups


def wait_for_groups(release: Release, number: int, *, seconds: float) -> dict[str, dict[str, str]]:
    """Until so many are there, and all of their pods are ready. Returns them."""
    places = {str(index) for index in range(SIZE)}

    def complete() -> bool:
        groups = ready_groups(release)
        return len(groups) == number and all(set(uids) == places for uids in groups.values())

    wait_until(f"{number} groups of {SIZE}", complete, seconds)
    return ready_groups(release)
