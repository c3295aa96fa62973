"""How much memory is left, from copies of what kernels show."""

from __future__ import annotations

from pathlib import Path

from engine.local.host_memory import available_bytes

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = {"proc/meminfo": f"MemTotal: {16 << 20} kB\nMemFree: 12 kB\nMemAvailable: {8 << 20} kB\n"}


def test_without_control_groups(tmp_path: Path) -> None:
    assert available_bytes(write(tmp_path, MEMINFO)) == 8 * GIB


def test_a_system_that_does_not_say(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None


def test_version_2_limit_of_an_enclosing_group(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/pods"
    files = {
        "proc/self/cgroup": "0::/pods/one\n",
        f"{group}/one/memory.max": "max\n",
        f"{group}/one/memory.current": "5\n",
        f"{group}/memory.max": f"{4 * GIB}\n",
        f"{group}/memory.current": f"{3 * GIB}\n",
        f"{group}/memory.stat": f"anon 1\ninactive_file {GIB}\n",
    }
    assert available_bytes(write(tmp_path, MEMINFO | files)) == 2 * GIB


def test_version_2_limit_inside_a_container(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{2 * GIB}",
        "sys/fs/cgroup/memory.current": f"{3 * GIB}",
    }
    assert available_bytes(write(tmp_path, MEMINFO | files)) == 0


def test_version_1_limit(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/memory/docker/abc"
    files = {
        "proc/self/cgroup": "5:cpu:/docker/abc\n4:memory:/docker/abc\n",
        f"{group}/memory.limit_in_bytes": f"{GIB}",
        f"{group}/memory.usage_in_bytes": "1000",
        f"{group}/memory.stat": "total_inactive_file 400\n",
    }
    assert available_bytes(write(tmp_path, MEMINFO | files)) == GIB - 600
