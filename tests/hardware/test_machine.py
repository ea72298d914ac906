import os
from pathlib import Path

import pytest

from footplate.hardware.machine import (
    Limits,
    cgroup_limits,
    cpu_model,
    examine_machine,
    readable_size,
    usable_cores,
)


def _tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_container_of_version_2_grants_what_its_group_says(tmp_path):
    root = _tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/memory.max": "8589934592\n",
        },
    )

    assert cgroup_limits(root) == Limits(cores=1.5, memory_bytes=8 * 2**30)


def test_the_tightest_group_on_the_way_up_counts(tmp_path):
    root = _tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/kubepods/pod1/trainer\n",
            "sys/fs/cgroup/kubepods/pod1/trainer/cpu.max": "max 100000\n",
            "sys/fs/cgroup/kubepods/pod1/trainer/memory.max": "max\n",
            "sys/fs/cgroup/kubepods/pod1/cpu.max": "200000 100000\n",
            "sys/fs/cgroup/kubepods/memory.max": "1073741824\n",
            "sys/fs/cgroup/kubepods/cpu.max": "6400000 100000\n",
        },
    )

    assert cgroup_limits(root) == Limits(cores=2.0, memory_bytes=2**30)


def test_version_1_keeps_each_kind_of_limit_in_its_own_tree(tmp_path):
    root = _tree(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n0::/\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "4294967296\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_quota_us": "50000\n",
            "sys/fs/cgroup/cpu,cpuacct/docker/abc/cpu.cfs_period_us": "25000\n",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
        },
    )

    assert cgroup_limits(root) == Limits(cores=2.0, memory_bytes=4 * 2**30)


def test_a_system_without_control_groups_sets_no_limits(tmp_path):
    assert cgroup_limits(tmp_path) == Limits()


def test_a_process_bound_to_one_core_has_one():
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        assert usable_cores() <= 1
    finally:
        os.sched_setaffinity(0, before)


def test_the_machine_has_a_processor_memory_and_disk():
    machine = examine_machine()

    assert machine.cpu == cpu_model() != ""
    assert 0 < machine.usable_cores <= machine.cores
    assert 0 < machine.memory_free_bytes <= machine.memory_bytes
    assert machine.memory_limit_bytes is None or machine.memory_limit_bytes < machine.memory_bytes
    assert Path(machine.directory) == Path.cwd()
    assert machine.disk_free_bytes > 0


@pytest.mark.parametrize(("nbytes", "text"), [(64 * 2**20, "64 MiB"), (2**30, "1.0 GiB"), (25276510208, "23.5 GiB")])
def test_sizes_are_written_for_people(nbytes, text):
    assert readable_size(nbytes) == text
