# SPDX-License-Identifier: Apache-2.0
"""Control groups' limits, out of files laid out as the kernel lays them out."""

from pathlib import Path

import pytest

from shmconn.headroom import Headroom, MemoryLimit, memory_limit

GIB = 1 << 30
V2 = "41 31 0:38 {shown} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = (
    "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
    "32 31 0:29 {shown} /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"
    "35 31 0:32 {shown} /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n"
    "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n"
)
NO_LIMIT = 9223372036854771712


def host(root: Path, mounts: str, groups: str, shown: str = "/") -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/mountinfo").write_text(mounts.format(shown=shown))
    (root / "proc/self/cgroup").write_text(groups)


def v2(root: Path, group: str, limit: object, used: int, cache: int = 0) -> Path:
    folder = root / "sys/fs/cgroup" / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    stat = f"anon 5\nfile {9 * cache}\nshmem 7\ninactive_file {cache}\nactive_file 1024\n"
    (folder / "memory.stat").write_text(stat)
    return folder


def v1(root: Path, group: str, limit: int, used: int, cache: int = 0) -> Path:
    folder = root / "sys/fs/cgroup/memory" / group
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    stat = f"cache 3\ninactive_file 1\ntotal_inactive_file {cache}\ntotal_active_file 0\n"
    (folder / "memory.stat").write_text(stat)
    return folder


def test_a_limit_of_version_2_leaves_what_is_not_used_and_what_its_cache_gives_back(
    tmp_path: Path,
) -> None:
    host(tmp_path, V2, "0::/user.slice/job.scope\n")
    v2(tmp_path, "user.slice", "max", 9 * GIB)
    folder = v2(tmp_path, "user.slice/job.scope", 8 * GIB, 5 * GIB, cache=GIB)
    assert memory_limit(tmp_path) == MemoryLimit(str(folder), 8 * GIB, 4 * GIB + 1024)


def test_a_parent_s_limit_counts_where_it_leaves_less(tmp_path: Path) -> None:
    host(tmp_path, V2, "0::/kubepods/pod1/c1\n")
    v2(tmp_path, "kubepods/pod1/c1", 8 * GIB, GIB)
    folder = v2(tmp_path, "kubepods/pod1", 16 * GIB, 14 * GIB)
    found = memory_limit(tmp_path)
    assert found is not None
    assert (found.path, found.left) == (str(folder), 2 * GIB + 1024)


def test_a_container_that_sees_itself_as_the_root_has_its_limit(tmp_path: Path) -> None:
    host(tmp_path, V2, "0::/\n")
    v2(tmp_path, "", 2 * GIB, GIB)
    found = memory_limit(tmp_path)
    assert found is not None and found.left == GIB + 1024


@pytest.mark.parametrize("group", ["/../../other", "/gone/away"])
def test_a_group_that_cannot_be_seen_is_looked_for_at_what_is_mounted(
    tmp_path: Path, group: str
) -> None:
    host(tmp_path, V2, f"0::{group}\n")
    v2(tmp_path, "", 2 * GIB, GIB)
    found = memory_limit(tmp_path)
    assert found is not None and found.limit == 2 * GIB


def test_a_limit_of_version_1_and_its_parents(tmp_path: Path) -> None:
    host(tmp_path, V1, "8:pids:/x\n5:cpu,memory:/docker/abc\n0::/\n")
    v1(tmp_path, "docker/abc", NO_LIMIT, GIB)
    folder = v1(tmp_path, "docker", 4 * GIB, 3 * GIB, cache=GIB)
    assert memory_limit(tmp_path) == MemoryLimit(str(folder), 4 * GIB, 2 * GIB)


def test_a_mount_that_shows_the_container_s_own_group_is_not_searched_below(
    tmp_path: Path,
) -> None:
    host(tmp_path, V1, "5:memory:/docker/abc\n", shown="/docker/abc")
    folder = v1(tmp_path, "", 4 * GIB, 3 * GIB)
    v1(tmp_path, "docker/abc", GIB, GIB)
    assert memory_limit(tmp_path) == MemoryLimit(str(folder), 4 * GIB, GIB)


@pytest.mark.parametrize("groups", ["", "0::/a\n", "5:memory:/a\n"])
def test_without_a_limit_there_is_none(tmp_path: Path, groups: str) -> None:
    host(tmp_path, V2, groups)
    v2(tmp_path, "a", "max", GIB)
    assert memory_limit(tmp_path) is None


def test_without_proc_there_is_none(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None


def test_used_above_the_limit_leaves_nothing(tmp_path: Path) -> None:
    host(tmp_path, V2, "0::/a\n")
    v2(tmp_path, "a", GIB, 3 * GIB)
    found = memory_limit(tmp_path)
    assert found is not None and found.left == 0


def test_a_refusal_names_what_is_short() -> None:
    group = MemoryLimit("/sys/fs/cgroup/job", 4 * GIB, GIB)
    text = Headroom(8 * GIB, group).refusal("ring 'r'", 2 * GIB)
    assert "control group /sys/fs/cgroup/job allows 4.0 GiB, of which 1.0 GiB are left" in text
    assert "--memory" in text and "/dev/shm" not in text
    wide = MemoryLimit("/sys/fs/cgroup/job", 4 * GIB, 3 * GIB)
    text = Headroom(GIB, wide).refusal("r", 2 * GIB)
    assert "needs 2.0 GiB in /dev/shm, 1.0 GiB are free" in text and "--shm-size" in text
    assert Headroom(GIB, group).free == Headroom(2 * GIB, group).free == GIB
