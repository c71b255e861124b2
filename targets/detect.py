"""What this machine offers to this process: cores, caches and memory, within its limits.

Everything comes from /proc and /sys, below a `root` that tests replace.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator, Set
from pathlib import Path
from typing import Any

from atsc.compiler.isa import cpu_flags, highest_level
from atsc.targets.detect_gpu import detect_gpu
from atsc.targets.target import Target

FEATURES = ("avx_vnni", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
_CPUS = "sys/devices/system/cpu"
_UNITS = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def detect(root: Path = Path("/"), allowed: Set[int] | None = None) -> Target:
    """Describe this machine.

    Args:
        root: the folder that holds proc/ and sys/.
        allowed: CPUs that the process may run on; by default its affinity.
    """
    cpus = sorted(allowed if allowed is not None else os.sched_getaffinity(0))
    flags = cpu_flags(root / "proc/cpuinfo")
    preferred = [cpu for cpu in cpus if cpu in _performance_cpus(root, cpus)]
    return Target(
        name=platform.node() or "this-machine",
        isa=highest_level(flags) or "unknown",
        cpu_model=_cpu_model(root),
        features=tuple(name for name in FEATURES if name in flags),
        num_cores=len({_siblings(root, cpu) for cpu in preferred or cpus}),
        num_threads=len(cpus),
        cpu_limit=_cpu_limit(root),
        l2_bytes=_cache_bytes(root, cpus[:1], level=2),
        l3_bytes=_cache_bytes(root, cpus, level=3),
        ram_bytes=_ram_bytes(root),
        **_gpu_fields(root),
        source="detected",
    )


def _gpu_fields(root: Path) -> dict[str, Any]:
    """The GPU's part of a Target; a `root` of a test describes another machine, without one."""
    gpu = detect_gpu() if root == Path("/") else None
    if gpu is None:
        return {}
    return {
        "gpu": "cuda",
        "gpu_model": gpu.model,
        "sm": gpu.sm,
        "num_sms": gpu.num_sms,
        "vram_bytes": gpu.vram_bytes,
    }


def parse_cpu_list(text: str) -> frozenset[int]:
    """CPUs of a list as the kernel writes it: `0-3,8,10-11`."""
    found: set[int] = set()
    for piece in filter(None, text.strip().split(",")):
        first, _, last = piece.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def _read(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return None


def _cpu_model(root: Path) -> str:
    for line in (_read(root / "proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _siblings(root: Path, cpu: int) -> frozenset[int]:
    """The hardware threads of a CPU's core, as a key for the core."""
    topology = root / _CPUS / f"cpu{cpu}" / "topology"
    text = _read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list")
    return parse_cpu_list(text) if text else frozenset({cpu})


def _performance_cpus(root: Path, cpus: list[int]) -> frozenset[int]:
    """On a hybrid CPU those of the fast cores, else all."""
    text = _read(root / "sys/devices/cpu_core/cpus")
    return parse_cpu_list(text) if text else frozenset(cpus)


def _cache_bytes(root: Path, cpus: list[int], level: int) -> int:
    """Bytes of all distinct caches of a level that some CPUs use."""
    sizes: dict[frozenset[int], int] = {}
    for cpu in cpus:
        for index in (root / _CPUS / f"cpu{cpu}" / "cache").glob("index*"):
            size = _read(index / "size")
            if _read(index / "level") != str(level) or not size:
                continue
            shared = parse_cpu_list(_read(index / "shared_cpu_list") or str(cpu))
            unit = _UNITS.get(size[-1], 1)
            sizes[shared] = int(size.rstrip("KMG")) * unit
    return sum(sizes.values())


def _cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders of our control group and of all above it that limit something, v1 or v2.

    In a container the path may be one that only the host sees; then what is mounted is ours.
    """
    mounted = root / "sys/fs/cgroup"
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        bases = [mounted / controllers, mounted / controller] if controllers else [mounted]
        base = next((b for b in bases if b.is_dir()), mounted)
        group = base / path.lstrip("/")
        while group != base:
            yield group
            group = group.parent
        yield base


def _cpu_limit(root: Path) -> float | None:
    """The smallest quota of CPU time over the period, in CPUs."""
    limits: list[float] = []
    for folder in _cgroup_folders(root, "cpu"):
        v2 = (_read(folder / "cpu.max") or "").split()
        v1 = [_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")]
        quota, period = v2 if len(v2) == 2 else v1
        if quota and period and quota.isdigit() and int(period) > 0:
            limits.append(int(quota) / int(period))
    return min(limits) if limits else None


def _ram_bytes(root: Path) -> int:
    sizes: list[int] = []
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        if line.startswith("MemTotal:"):
            sizes.append(int(line.split()[1]) << 10)
    for folder in _cgroup_folders(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name)
            if text and text.isdigit():
                sizes.append(int(text))
    return min(sizes, default=0)
