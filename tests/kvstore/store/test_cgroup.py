"""Control groups as the kernel shows them, in a /proc and /sys of the test's own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from warmkv.kvstore.store import cgroup
from warmkv.kvstore.store.cgroup import warm_budget

MIB = 1 << 20
NO_LIMIT_V1 = 9223372036854771712


class Machine:
    """Writes what processes and the kernel's files of a machine say."""

    def __init__(self, root: Path) -> None:
        self.proc = root / "proc"
        self.sys = root / "sys fs"
        self.process("self", "")

    def process(self, pid: str, groups: str) -> None:
        (self.proc / pid).mkdir(parents=True, exist_ok=True)
        (self.proc / pid / "cgroup").write_text(groups)

    def mounts(self, *lines: str) -> None:
        where = str(self.sys).replace(" ", r"\040")
        (self.proc / "self" / "mountinfo").write_text("".join(line.replace("SYS", where) + "\n" for line in lines))

    def group(self, path: str, **files: object) -> None:
        folder = self.sys / path
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / name.replace("_", ".", 1)).write_text(f"{value}\n")

    def found(self) -> cgroup.MemoryCgroup | None:
        return cgroup.find(proc=self.proc)

    def limit(self) -> int | None:
        group = self.found()
        assert group is not None
        return group.limit_bytes()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


V2 = "30 24 0:26 / SYS rw,nosuid - cgroup2 cgroup2 rw"
V1 = "35 31 0:32 / SYS rw,relatime shared:9 - cgroup cgroup rw,memory"


def test_the_tightest_limit_above_a_group_counts(machine: Machine) -> None:
    machine.process("self", "0::/user.slice/app.slice/warmkv.service\n")
    machine.mounts(V2)
    machine.group("user.slice", memory_max=512 * MIB, memory_high="max")
    machine.group("user.slice/app.slice", memory_max="max", memory_high="max")
    machine.group("user.slice/app.slice/warmkv.service", memory_max=1024 * MIB, memory_high="max")
    assert machine.limit() == 512 * MIB
    machine.group("user.slice/app.slice", memory_high=300 * MIB)
    assert machine.limit() == 300 * MIB


def test_no_limit_anywhere_is_none(machine: Machine) -> None:
    machine.process("self", "0::/a\n")
    machine.mounts(V2)
    machine.group("a", memory_max="max", memory_high="max")
    assert machine.limit() is None


def test_version_1_wins_where_both_are_mounted_and_knows_limits_above_the_mount(machine: Machine) -> None:
    machine.process("self", "5:cpu:/x\n4:hugetlb,memory:/docker/abc\n0::/docker/abc\n")
    machine.mounts("41 31 0:38 / SYS/unified rw - cgroup2 cgroup2 rw", V1.replace("0:32 / SYS", "0:32 /docker/abc SYS"))
    stat = f"hierarchical_memory_limit {200 * MIB}"
    machine.group(".", memory_limit_in_bytes=NO_LIMIT_V1, memory_stat=stat)
    found = machine.found()
    assert found is not None and (found.version, found.directory) == (1, machine.sys)
    assert machine.limit() == 200 * MIB
    machine.group(".", memory_stat=f"hierarchical_memory_limit {NO_LIMIT_V1}")
    assert machine.limit() is None
    machine.group(".", memory_limit_in_bytes=64 * MIB)
    assert machine.limit() == 64 * MIB


def test_a_group_known_to_the_host_only_is_the_one_at_the_top(machine: Machine) -> None:
    machine.process("self", "0::/system.slice/docker-0123.scope\n")
    machine.mounts(V2)
    machine.group(".", memory_max=256 * MIB)
    assert machine.limit() == 256 * MIB


def test_a_path_outside_of_the_namespace_is_followed_nowhere(machine: Machine) -> None:
    machine.process("self", "0::/../secret\n")
    machine.mounts(V2)
    machine.group(".", memory_max=256 * MIB)
    machine.group("../secret", memory_max=1)
    found = machine.found()
    assert found is not None and found.directory == machine.sys


@pytest.mark.parametrize("text", ["", "garbage\n", "0::\n", "4:memory\n", "::::\n"])
def test_without_groups_there_is_none(machine: Machine, text: str) -> None:
    machine.process("self", text)
    machine.mounts("no mount at all", "30 24 0:26")
    assert machine.found() is None
    (machine.proc / "self" / "cgroup").unlink()
    (machine.proc / "self" / "mountinfo").unlink()
    assert machine.found() is None


def test_use_is_told_with_shared_memory_and_files_apart(machine: Machine) -> None:
    machine.process("self", "0::/a\n")
    machine.mounts(V2)
    machine.group("a", memory_current=1000, memory_stat="anon 100\nfile 700\nshmem 600\nnonsense\n")
    found = machine.found()
    assert found is not None and found.usage() == cgroup.Usage(1000, 600, 100)
    (machine.sys / "a" / "memory.stat").unlink()
    assert found.usage() == cgroup.Usage(1000, None, None)


def test_use_in_version_1_counts_groups_below(machine: Machine) -> None:
    machine.process("self", "4:memory:/a\n")
    machine.mounts(V1)
    stat = "cache 5\nshmem 2\ntotal_cache 700\ntotal_shmem 600\n"
    machine.group("a", memory_usage_in_bytes=1000, memory_stat=stat)
    found = machine.found()
    assert found is not None and found.usage() == cgroup.Usage(1000, 600, 100)


def test_pressure_is_told_by_version_2_only(machine: Machine) -> None:
    machine.process("self", "0::/a\n")
    machine.mounts(V2)
    machine.group("a")
    found = machine.found()
    assert found is not None and found.pressure_file() is None
    machine.group("a", memory_pressure="some avg10=0.00")
    assert found.pressure_file() == machine.sys / "a" / "memory.pressure"


def test_processes_of_one_group_and_of_others(machine: Machine) -> None:
    machine.process("self", "4:memory:/a\n0::/x\n")
    machine.process("10", "4:memory:/a\n0::/y\n")
    machine.process("11", "4:memory:/b\n0::/x\n")
    machine.process("12", "0::/x\n")
    told = [cgroup.same_memory_cgroup(pid, machine.proc) for pid in (10, 11, 12, 13, 0, -1)]
    assert told == [True, False, False, False, False, False]
    machine.process("self", "0::/x\n")
    assert cgroup.same_memory_cgroup(12, machine.proc) and not cgroup.same_memory_cgroup(10, machine.proc)


def test_where_nothing_is_counted_nobody_is_foreign(machine: Machine) -> None:
    assert cgroup.same_memory_cgroup(10, machine.proc)


@pytest.mark.parametrize(
    ("configured", "limit", "machine_bytes", "budget"),
    [
        (None, None, 1000, 250),
        (None, 400, 1000, 100),
        (None, 4000, 1000, 250),
        (300, None, 1000, 300),
        (300, 400, 1000, 300),
        (400, 400, 1000, 300),
        (5000, 400, 1000, 300),
        (0, 400, 1000, 0),
    ],
)
def test_the_warm_budget_stays_within_what_may_be_used(
    configured: int | None, limit: int | None, machine_bytes: int, budget: int
) -> None:
    assert warm_budget(configured, limit, machine_bytes) == budget


def test_this_process_shares_its_group_with_itself_and_its_children() -> None:
    with subprocess.Popen(["sleep", "60"]) as child:
        assert cgroup.same_memory_cgroup(os.getpid()) and cgroup.same_memory_cgroup(child.pid)
        child.kill()
    assert cgroup.machine_bytes() > MIB
    limit = cgroup.limit_bytes()
    assert limit is None or limit > 0
    assert set(cgroup.memory()) in (set(), {"limit_bytes", "used_bytes", "shmem_bytes", "file_bytes"})
