"""Detection on made-up /proc and /sys trees, and on the machine that runs the tests."""

from __future__ import annotations

import os
from pathlib import Path

from atsc.compiler.isa import ISA_FLAGS
from atsc.targets.detect import detect, parse_cpu_list

GIB = 1 << 30


def machine(root: Path, *, siblings: dict[int, str], files: dict[str, str]) -> Path:
    """A tree with one L2 a core and one L3 for all."""
    flags = " ".join(sorted(frozenset().union(*list(ISA_FLAGS.values())[:3]) | {"avx_vnni"}))
    tree = {
        "proc/cpuinfo": f"processor\t: 0\nmodel name\t: Some CPU @ 3 GHz\nflags\t\t: {flags}\n",
        "proc/meminfo": f"MemTotal:       {16 * GIB >> 10} kB\nMemFree: 1 kB\n",
        "proc/self/cgroup": "0::/\n",
        **files,
    }
    for cpu, shared in siblings.items():
        base = f"sys/devices/system/cpu/cpu{cpu}"
        tree[f"{base}/topology/core_cpus_list"] = shared
        for index, (level, size, users) in enumerate(
            [("1", "32K", shared), ("2", "512K", shared), ("3", "16M", f"0-{len(siblings) - 1}")]
        ):
            tree[f"{base}/cache/index{index}/level"] = level
            tree[f"{base}/cache/index{index}/size"] = size
            tree[f"{base}/cache/index{index}/shared_cpu_list"] = users
    for name, text in tree.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


SMT = {0: "0,2", 1: "1,3", 2: "0,2", 3: "1,3"}


def test_smt_siblings_are_one_core(tmp_path: Path) -> None:
    target = detect(machine(tmp_path, siblings=SMT, files={}), {0, 1, 2, 3})
    assert (target.num_cores, target.num_threads) == (2, 4)
    assert (target.l2_bytes, target.l3_bytes) == (512 << 10, 16 << 20)
    assert (target.isa, target.features) == ("x86-64-v3", ("avx_vnni",))
    assert target.cpu_model == "Some CPU @ 3 GHz"
    assert target.ram_bytes == 16 * GIB
    assert target.cpu_limit is None
    assert target.source == "detected"


def test_affinity_counts(tmp_path: Path) -> None:
    root = machine(tmp_path, siblings=SMT, files={})
    assert detect(root, {0, 2}).num_cores == 1
    assert detect(root, {1}).num_threads == 1


def test_a_hybrid_cpu_counts_its_performance_cores(tmp_path: Path) -> None:
    siblings = {0: "0-1", 1: "0-1", 2: "2", 3: "3"}
    root = machine(tmp_path, siblings=siblings, files={"sys/devices/cpu_core/cpus": "0-1\n"})
    assert detect(root, {0, 1, 2, 3}).num_cores == 1
    assert detect(root, {2, 3}).num_cores == 2, "no fast core allowed: the others count"


def test_cgroup_v2_limits_of_any_ancestor(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/outer/inner\n",
        "sys/fs/cgroup/outer/cpu.max": "150000 100000\n",
        "sys/fs/cgroup/outer/inner/cpu.max": "max 100000\n",
        "sys/fs/cgroup/outer/inner/memory.max": "max\n",
        "sys/fs/cgroup/outer/memory.max": str(3 * GIB),
    }
    target = detect(machine(tmp_path, siblings=SMT, files=files), {0, 1, 2, 3})
    assert target.cpu_limit == 1.5
    assert target.ram_bytes == 3 * GIB
    assert target.default_threads == 1


def test_cgroup_v1_limits_where_the_path_is_the_hosts(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/host/only\n2:memory:/host/only\n1:name=systemd:/\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "300000\n",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
    }
    target = detect(machine(tmp_path, siblings=SMT, files=files), {0, 1, 2, 3})
    assert target.cpu_limit == 3.0
    assert target.ram_bytes == 2 * GIB


def test_an_unlimited_cgroup_v1_quota(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "1:cpu:/\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    assert detect(machine(tmp_path, siblings=SMT, files=files), {0}).cpu_limit is None


def test_a_bare_tree_gives_what_is_known(tmp_path: Path) -> None:
    target = detect(tmp_path, {0, 1})
    assert (target.isa, target.num_cores, target.l3_bytes) == ("unknown", 2, 0)


def test_this_machine() -> None:
    target = detect()
    assert 1 <= target.num_cores <= target.num_threads == len(os.sched_getaffinity(0))
    assert 0 < target.ram_bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_cpu_lists() -> None:
    assert parse_cpu_list("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11}
    assert parse_cpu_list("") == set()
