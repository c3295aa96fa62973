"""How much memory this process may still take, as the kernel and its control group see it, and what KV blocks get."""

from __future__ import annotations

from pathlib import Path

from common.config import EngineSettings

GIB = 1 << 30


def num_host_blocks(settings: EngineSettings, block_bytes: int) -> int:
    """How many blocks host memory has room for: those that the device evicts and those of swapped requests together."""
    return int(host_cache_gb(settings) * GIB) // block_bytes


def host_cache_gb(settings: EngineSettings) -> float:
    return settings.host_cache_gb + (settings.swap_space_gb if settings.preemption_mode == "swap" else 0.0)


def available_bytes(root: Path = Path("/")) -> int | None:
    """Bytes that can be allocated without swapping or being killed; None if the system does not say.

    The least of the machine's MemAvailable and the room in each enclosing control group (v2 or v1). Allocation
    itself is no test: Linux hands out address space that it cannot back.
    """
    candidates = [_mem_available(root / "proc/meminfo")]
    for group in _control_groups(root):
        candidates.append(_room(group, "memory.max", "memory.current", "inactive_file"))
        candidates.append(_room(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"))
    known = [value for value in candidates if value is not None]
    return min(known) if known else None


def _mem_available(meminfo: Path) -> int | None:
    for line in _read(meminfo).splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _control_groups(root: Path) -> list[Path]:
    """Folders of this process's memory group and of all groups around it."""
    folders: list[Path] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        group = base / path.lstrip("/")
        while group != base and base in group.parents:
            folders.append(group)
            group = group.parent
        folders.append(base)
    return folders


def _room(group: Path, limit_file: str, usage_file: str, reclaimable_key: str) -> int | None:
    limit, usage = _read(group / limit_file).strip(), _read(group / usage_file).strip()
    if not limit.isdigit() or not usage.isdigit():  # "max", or no such file
        return None
    reclaimable = 0
    for line in _read(group / "memory.stat").splitlines():
        key, _, value = line.partition(" ")
        if key == reclaimable_key:
            reclaimable = int(value)
    return max(0, int(limit) - int(usage) + reclaimable)


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:  # not Linux, or not our kind of control group: then this source says nothing
        return ""
