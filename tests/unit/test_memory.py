"""How much memory is available, by files as the kernel writes them."""

from pathlib import Path

from dmfs import memory

GiB = 1 << 30


def proc(folder: Path, available_kib: int, *cgroups: str) -> Path:
    """A /proc with these lines in self/cgroup."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/meminfo").write_text(f"MemTotal: 999 kB\nMemAvailable:  {available_kib} kB\nCached: 5 kB\n")
    (folder / "proc/self/cgroup").write_text("".join(f"{line}\n" for line in cgroups))
    return folder / "proc"


def group(folder: Path, limit: str, current: int, inactive: int, *, v1: bool = False) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if v1 else ("memory.max", "memory.current")
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{current}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{'total_' if v1 else ''}inactive_file {inactive}\n")


def test_the_machine_alone(tmp_path: Path) -> None:
    at = proc(tmp_path, 8 << 20)
    assert memory.available(str(at), str(tmp_path / "none")) == 8 * GiB


def test_the_tightest_group_above_counts(tmp_path: Path) -> None:
    at, root = proc(tmp_path, 8 << 20, "0::/jobs/42"), tmp_path / "cg"
    group(root / "jobs/42", "max", 5 * GiB, 0)
    assert memory.available(str(at), str(root)) == 8 * GiB
    group(root / "jobs", str(4 * GiB), 3 * GiB, GiB // 2)
    assert memory.available(str(at), str(root)) == GiB * 3 // 2, "what is left, and cache that nobody touches"
    group(root / "jobs/42", str(2 * GiB), 2 * GiB, 0)
    assert memory.available(str(at), str(root)) == 0


def test_the_old_hierarchy(tmp_path: Path) -> None:
    at, root = proc(tmp_path, 8 << 20, "4:cpu,memory:/job", "1:name=systemd:/", "0::/"), tmp_path / "cg"
    group(root / "memory/job", str(3 * GiB), GiB, 0, v1=True)
    group(root / "memory", "9223372036854771712", 5 * GiB, 0, v1=True)
    assert memory.available(str(at), str(root)) == 2 * GiB


def test_more_than_the_limit_is_nothing_left(tmp_path: Path) -> None:
    at, root = proc(tmp_path, 8 << 20, "0::/"), tmp_path / "cg"
    group(root, str(GiB), 2 * GiB, 0)
    assert memory.available(str(at), str(root)) == 0


def test_nothing_that_can_be_read_is_no_room(tmp_path: Path) -> None:
    assert memory.available(str(tmp_path), str(tmp_path)) == 0


def test_this_machine() -> None:
    assert 0 <= memory.available() < 1 << 60
