"""Workers of a random model that takes no time to compute, on a claim: for tests in which many pods share few cores.

The claim is bound to a folder of this machine, so it is for local clusters. A folder mounted by the pod itself
(`model.volume.type: hostPath`) would be refused by the pod security level `restricted`.
"""

from __future__ import annotations

import json
from typing import Any

from tests.kube.cluster import Cluster

CLAIM, NAME = "models", "tiny"
# Equal answers whatever the batch: float32 throughout.
VALUES: dict[str, Any] = {
    "model__name": NAME,
    "model__dtype": "float32",
    "model__volume": {"type": "pvc", "claimName": CLAIM},
    **{
        f"{role}__{key}": value
        for role in ("prefill", "decode", "both")
        for key, value in {
            "settings__kv_cache_memory_gb": 0.03,
            "resources": {"requests": {"cpu": "50m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}},
        }.items()
    },
}


def offer_tiny_model(cluster: Cluster, namespace: str) -> dict[str, Any]:
    """Makes the claim, and returns the values of a release that uses it."""
    folder = cluster.folder / CLAIM
    if not folder.exists():
        from tests.chaos.tiny_model import write_tiny_model  # torch takes its time, and not every test needs it

        model = folder / NAME
        model.mkdir(parents=True)
        write_tiny_model(model)
        for path in (folder, model, *model.iterdir()):
            path.chmod(0o755)  # pods are somebody else
    name = f"{CLAIM}-{namespace}"
    size = {"storage": "1Gi"}
    both = {"accessModes": ["ReadOnlyMany"], "storageClassName": "", "volumeMode": "Filesystem"}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name},
        "spec": {**both, "capacity": size, "hostPath": {"path": str(folder), "type": "Directory"}},
    }
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": CLAIM, "namespace": namespace},
        "spec": {**both, "resources": {"requests": size}, "volumeName": name},
    }
    for one in (volume, claim):
        cluster.apply(json.dumps(one))
    return VALUES
