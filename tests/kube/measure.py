"""What the control loop takes on a real cluster: `python -m tests.kube.measure [--repeat N] [--out FILE]` writes JSON.

    load step ── decided ──> pod created ──> container runs ──> ready ──> first request
        └──────── ours ─────────┘                                └── ours ──┘

The pods run a model that loads in no time, so what is between is Kubernetes, Python and torch starting. Seconds are as
seen from outside: each event when a watch of the API server told of it. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from baton.client.sync_client import Client
from tests.kube import audit, images
from tests.kube.cluster import Cluster, why_not
from tests.kube.control_plane import tool
from tests.kube.processes import wait_until
from tests.kube.release import Release, is_ready
from tests.kube.tiny_model import offer_tiny_model

NAMESPACE = "baton-measured"
METRIC = f"/apis/external.metrics.k8s.io/v1beta1/namespaces/{NAMESPACE}/baton_decode_requests"
NUM_CLIENTS, REQUESTS_PER_POD = 10, 6
REST_S = 120.0

Json = dict[str, Any]


class Watch:
    """Events of one API path, each with when it came."""

    def __init__(self, cluster: Cluster, path: str) -> None:
        command = [tool("kubectl"), "get", "--raw", f"{path}?watch=true"]
        environ = {**os.environ, "KUBECONFIG": str(cluster.kubeconfig)}
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ)
        self._seen: list[tuple[float, Json]] = []
        self._news = threading.Condition()
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._news:
                self._seen.append((time.monotonic(), json.loads(line)["object"]))
                self._news.notify_all()

    def first(self, what: str, matches: Callable[[Json], bool], since: float, timeout_s: float = 300) -> float:
        """When the first object that `matches` came after `since`. Raises RuntimeError if none does."""
        deadline, known = time.monotonic() + timeout_s, 0
        with self._news:
            while True:
                for at, item in self._seen[known:]:
                    if at >= since and matches(item):
                        return at
                known = len(self._seen)
                if not self._news.wait(deadline - time.monotonic()):
                    raise RuntimeError(f"{what}: not seen within {timeout_s:g} s")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join()


@dataclass
class Traffic:
    """Short requests of some clients, without end: when each was sent, and who decoded it."""

    sent: list[tuple[float, str]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def first_at(self, worker: str) -> float | None:
        return min((at for at, who in self.sent if who == worker), default=None)


@contextmanager
def traffic(port: int) -> Iterator[Traffic]:
    seen, stop = Traffic(), threading.Event()

    def ask(number: int) -> None:
        prompt = [100 + (number * 31 + i) % 250 for i in range(16)]
        with Client(f"127.0.0.1:{port}", timeout=300) as client:
            while not stop.is_set():
                at = time.monotonic()
                try:
                    done = client.generate(prompt, max_tokens=60, ignore_eos=True, temperature=0.0).result()
                except Exception as error:
                    seen.failures.append(repr(error))
                    return
                seen.sent.append((at, done.report.decode_worker))

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(NUM_CLIENTS)]
    for thread in threads:
        thread.start()
    try:
        yield seen
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if seen.failures:
        raise RuntimeError(f"requests failed: {seen.failures}")


def scale_up(cluster: Cluster, release: Release, port: int) -> Json:
    """One load step with one decode worker, until a second one has got its first request. Seconds."""
    wait_until("one decode worker", lambda: _num_workers(release) == 1, 300)
    old = {pod["metadata"]["name"] for pod in release.pods("decode", going=True)}
    deployments = Watch(cluster, f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments")
    pods = Watch(cluster, f"/api/v1/namespaces/{NAMESPACE}/pods")

    def is_new(pod: Json) -> bool:
        role = pod["metadata"]["labels"].get("app.kubernetes.io/component")
        return role == "decode" and pod["metadata"]["name"] not in old

    def runs(pod: Json) -> bool:
        return is_new(pod) and any("running" in one["state"] for one in pod["status"].get("containerStatuses", ()))

    try:
        time.sleep(2)  # what is there already has been told of
        with traffic(port) as seen:
            began = time.monotonic()
            told = deployments.first("replicas", _wants_two, began)
            created = pods.first("a pod", is_new, began)
            running = pods.first("its container", runs, began)
            ready = pods.first("the pod to be ready", lambda pod: is_new(pod) and is_ready(pod), began)
            [new] = [pod for pod in release.pods("decode") if pod["metadata"]["name"] not in old]
            worker = f"{new['status']['podIP']}:50061"
            wait_until("its first request", lambda: seen.first_at(worker) is not None, 60)
    finally:
        deployments.close()
        pods.close()
    first = seen.first_at(worker)
    assert first is not None
    return {
        "load_to_replicas": told - began,
        "replicas_to_pod": created - told,
        "pod_to_container": running - created,
        "container_to_ready": ready - running,
        "ready_to_first_request": first - ready,
        "ours": (told - began) + max(first - ready, 0.0),
    }


def _wants_two(deployment: Json) -> bool:
    return (deployment["metadata"]["name"], deployment["spec"].get("replicas")) == ("baton-decode", 2)


def _num_workers(release: Release) -> int:
    pods = release.pods("decode", going=True)
    return len(pods) if all(map(is_ready, pods)) else 0


def metric_age(cluster: Cluster, port: int, samples: int = 60) -> Json:
    """Of what an HPA reads: its timestamp, which has whole seconds, so that up to one second is rounding; and from a
    load step to a value that shows it."""
    ages = [_age(cluster) for _ in range(samples)]
    wait_until("no load", lambda: _value(cluster) == 0, 60)
    with traffic(port):
        began = time.monotonic()
        wait_until("a value", lambda: _value(cluster) >= REQUESTS_PER_POD, 60)
        shown = time.monotonic() - began
    return {"age_max": max(ages), "age_median": statistics.median(ages), "load_to_value": shown}


def _metric(cluster: Cluster) -> Json:
    answer: Json = json.loads(cluster.kubectl("get", "--raw", METRIC))["items"][0]
    return answer


def _age(cluster: Cluster) -> float:
    at = datetime.fromisoformat(_metric(cluster)["timestamp"])
    return (datetime.now(UTC) - at).total_seconds()


def _value(cluster: Cluster) -> float:
    text = _metric(cluster)["value"]
    return float(text[:-1]) / 1000 if text.endswith("m") else float(text)


def at_rest(cluster: Cluster, release: Release) -> Json:
    """Requests per minute and pod that each component makes of the API server while nobody asks anything."""
    start = audit.position(cluster.audit_log)
    time.sleep(REST_S)
    found: Json = {}
    for component in ("router", "autoscaler"):
        user = audit.account(NAMESPACE, f"baton-{component}")
        asked = audit.requests(cluster.audit_log, start, user=user)
        kinds = sorted({f"{one.verb} {one.resource}" for one in asked})
        scale = 60 / REST_S / len(release.pods(component))
        found[component] = {
            "all": len(asked) * scale,
            **{kind: sum(f"{one.verb} {one.resource}" == kind for one in asked) * scale for kind in kinds},
        }
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kube.measure", description=__doc__.partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=3, help="load steps")
    parser.add_argument("--out", type=Path, help="file for the JSON, which is printed too")
    options = parser.parse_args()
    if reason := why_not() or images.why_not():
        parser.error(f"no cluster can be started here: {reason}")
    with tempfile.TemporaryDirectory(prefix="baton-kube-") as folder:
        archives = [images.archive(name) for name in ("router", "cpu")]
        with Cluster(Path(folder), images.FOLDER / "node") as cluster:
            for archive in archives:
                cluster.load_image(archive)
            release = Release(cluster, "baton", NAMESPACE)
            release.install(
                "values-laptop.yaml",
                **offer_tiny_model(cluster, NAMESPACE),
                autoscaling__mode="external-metrics",
                prefill__autoscaling={"minReplicas": 1, "maxReplicas": 1},
                decode__autoscaling={
                    "minReplicas": 1, "maxReplicas": 2, "requestsPerPod": REQUESTS_PER_POD, "scaleDownSeconds": 5,
                },
            )  # fmt: skip
            port = cluster.forward(f"baton-router.{NAMESPACE}", 50051)
            result = {
                "cpus": os.cpu_count(),
                "load_average": os.getloadavg()[0],
                "seconds_of_a_load_step": [scale_up(cluster, release, port) for _ in range(options.repeat)],
                "seconds_of_the_metric": metric_age(cluster, port),
                "requests_per_minute_and_pod_at_rest": at_rest(cluster, release),
            }
            release.remove()
    text = json.dumps(result, indent=1)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
