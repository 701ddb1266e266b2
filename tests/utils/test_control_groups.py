"""The limits of control groups, of both versions, nested, and as containers show them."""

from pathlib import Path

import pytest

from rptrain.utils import parallel
from rptrain.utils.control_groups import core_quotas, memory_left


def group(path: Path, **values: str | int) -> None:
    path.mkdir(parents=True, exist_ok=True)
    for name, value in values.items():
        (path / name.replace("__", ".")).write_text(f"{value}\n")


def test_the_least_of_nested_groups_counts(tmp_path):
    memberships, root = tmp_path / "cgroup", tmp_path / "fs"
    memberships.write_text("0::/a/b/c\n")
    group(root / "a/b/c", memory__max="max", memory__current=10, cpu__max="max 100000")
    group(root / "a/b", memory__max=1000, memory__current=300, cpu__max="350000 100000")
    group(root / "a", memory__max=5000, memory__current=4900, cpu__max="400000 100000")
    group(root / "elsewhere", memory__max=1, memory__current=0, cpu__max="100000 100000")
    assert min(memory_left(memberships, root)) == 100
    assert [*core_quotas(memberships, root)] == [3.5, 4.0]
    group(root / "a", memory__max=5000, memory__current=5100)
    assert min(memory_left(memberships, root)) == 0


def test_groups_of_version_1_and_those_that_a_container_hides(tmp_path):
    memberships, root = tmp_path / "cgroup", tmp_path / "fs"
    memberships.write_text("9:name=systemd:/\n4:cpu,memory:/jobs/7\n1:cpu:/\n0::/\n")
    group(root / "memory/jobs", memory__limit_in_bytes=800, memory__usage_in_bytes=100)
    group(root / "memory", memory__limit_in_bytes=2**63 - 4096, memory__usage_in_bytes=100)
    group(root / "cpu/jobs", cpu__cfs_quota_us=150000, cpu__cfs_period_us=100000)
    group(root / "cpu", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    assert min(memory_left(memberships, root)) == 700
    assert [*core_quotas(memberships, root)] == [1.5]
    memberships.write_text("0::/hidden/in/the/container\n")
    group(root, memory__max=600, memory__current=100, cpu__max="200000 100000")
    assert min(memory_left(memberships, root)) == 500
    assert {*core_quotas(memberships, root)} == {2.0}


GIB = 1 << 30
CACHE = f"anon {4 * GIB}\ninactive_file {46 * GIB}"


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory__max": 64 * GIB, "memory__stat": CACHE}, 60 * GIB),
        ({"memory__max": 64 * GIB, "memory__high": "max", "memory__stat": CACHE}, 60 * GIB),
        ({"memory__max": "max", "memory__high": 56 * GIB, "memory__stat": CACHE}, 52 * GIB),
        ({"memory__max": 64 * GIB, "memory__high": 56 * GIB, "memory__stat": CACHE}, 52 * GIB),
        ({"memory__max": 64 * GIB, "memory__stat": f"active_file {GIB}\nslab_reclaimable {2 * GIB}"}, 17 * GIB),
        ({"memory__max": 64 * GIB, "memory__stat": f"inactive_file {51 * GIB}"}, 64 * GIB),
        ({"memory__max": 64 * GIB, "memory__stat": "of another form"}, 14 * GIB),
        ({"memory__max": 64 * GIB}, 14 * GIB),
        ({"memory__max": 40 * GIB}, 0),
    ],
    ids=["cache", "no_high", "high_alone", "high", "slab", "changing", "unreadable", "no_stat", "over"],
)
def test_what_can_be_reclaimed_is_left(tmp_path, files, left):
    memberships, root = tmp_path / "cgroup", tmp_path / "fs"
    memberships.write_text("0::/a/b\n")
    group(root / "a/b", memory__current=50 * GIB, **files)
    group(root / "a", memory__max=100 * GIB, memory__current=90 * GIB, memory__stat=f"inactive_file {80 * GIB}")
    assert min(memory_left(memberships, root)) == left
    group(root / "a", memory__max=100 * GIB, memory__current=99 * GIB, memory__stat="inactive_file 0")
    assert min(memory_left(memberships, root)) == min(left, GIB)


def test_what_can_be_reclaimed_in_version_1(tmp_path):
    memberships, root = tmp_path / "cgroup", tmp_path / "fs"
    memberships.write_text("4:memory:/jobs\n")
    stat = f"inactive_file {GIB}\ntotal_inactive_file {46 * GIB}\ntotal_active_file {GIB}"
    group(root / "memory/jobs", memory__limit_in_bytes=64 * GIB, memory__usage_in_bytes=50 * GIB, memory__stat=stat)
    assert min(memory_left(memberships, root)) == 61 * GIB


@pytest.mark.parametrize("cpu", ["", "max", "max 100000"])
def test_groups_without_a_quota_in_a_known_form(tmp_path, cpu):
    memberships, root = tmp_path / "cgroup", tmp_path / "fs"
    memberships.write_text("4:cpu:/\n0::/jobs\n")
    group(root / "jobs", cpu__max=cpu)
    group(root / "cpu", cpu__cfs_quota_us=150000)  # without a period
    (root / "cpu.max").mkdir()
    assert [*core_quotas(memberships, root)] == []


def test_without_control_groups(tmp_path):
    assert [*memory_left(tmp_path / "none", tmp_path / "nothing")] == []
    assert [*core_quotas(tmp_path / "none", tmp_path / "nothing")] == []


def test_a_limit_of_processor_time_limits_the_cores(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(64))
    for quotas, count in (([], 64), ([3.5, 80.0], 4), ([0.5], 1)):
        monkeypatch.setattr("rptrain.utils.control_groups.core_quotas", lambda quotas=quotas: quotas)
        assert parallel.cores() == count
