"""The folder of a dataset on a tier: private, checked, and locked for as long as its process lives."""

import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dmfs.errors import CacheError
from dmfs.tiers.folder import DatasetFolder, folder_name, open_folder

SOURCE = "/data/set"


def open_it(tier: Path | str, *, source: str = SOURCE, dataset_id: str = SOURCE) -> DatasetFolder:
    """Open the folder of a dataset."""
    return open_folder(str(tier), source=source, dataset_id=dataset_id)


@pytest.fixture
def open_umask() -> Iterator[None]:
    """A umask that takes nothing away."""
    before = os.umask(0)
    yield
    os.umask(before)


def modes(folder: Path) -> dict[str, int]:
    """The permission bits of everything below a folder."""
    return {str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode) for path in sorted(folder.rglob("*"))}


def test_private_whatever_the_umask(tmp_path: Path, open_umask: None) -> None:
    """B12: nobody else can look into a cache."""
    tier = tmp_path / "tier"
    open_it(tier)
    name = folder_name(SOURCE, SOURCE)
    assert stat.S_IMODE(tier.stat().st_mode) == 0o700
    assert modes(tier) == {
        name: 0o700,
        f"{name}/format.json": 0o600,
        f"{name}/lock": 0o600,
        f"{name}/objects": 0o700,
        f"{name}/tmp": 0o700,
    }


def test_opened_folder_is_made_private_again(tmp_path: Path) -> None:
    folder = open_it(tmp_path / "tier")
    path = Path(folder.path)
    del folder
    for part in (path, path / "objects", path / "tmp"):
        part.chmod(0o777)
    open_it(tmp_path / "tier")
    assert {stat.S_IMODE(part.stat().st_mode) for part in (path, path / "objects", path / "tmp")} == {0o700}


def test_names_tell_datasets_apart() -> None:
    assert folder_name("/data/set/", "x").startswith("set-")
    assert folder_name("/", "x").startswith("root-")
    names = {folder_name(source, dataset) for source in ("/a/s", "/b/s") for dataset in ("x", "y")}
    assert len(names) == 2, "the dataset's identity counts, not where it lies"
    assert len(os.fsencode(folder_name("/data/" + "\u00e9" * 120, "x"))) <= 255
    assert folder_name("/data/\udcff", "x")


@pytest.mark.parametrize("part", ["", "/objects", "/tmp"])
@pytest.mark.parametrize("kind", ["link", "file"])
def test_planted_link_is_refused(tmp_path: Path, part: str, kind: str) -> None:
    tier = tmp_path / "tier"
    path = tier / folder_name(SOURCE, SOURCE)
    path.mkdir(parents=True)
    planted = Path(f"{path}{part}")
    if planted.exists():
        planted.rmdir()
    if kind == "link":
        (tmp_path / "elsewhere").mkdir()
        planted.symlink_to(tmp_path / "elsewhere")
    else:
        planted.touch()
    with pytest.raises(CacheError, match="not a directory of yours"):
        open_it(tier)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("part", ["tier", "dataset", "objects"])
def test_folder_of_somebody_else_is_refused(tmp_path: Path, part: str) -> None:
    tier = tmp_path / "tier"
    path = Path(open_it(tier).path)
    os.chown({"tier": tier, "dataset": path, "objects": path / "objects"}[part], 12345, 12345)
    with pytest.raises(CacheError, match=r"belongs to user 12345|not a directory of yours"):
        open_it(tier)


def test_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    path = Path(open_it(tmp_path / "tier").path)
    (path / "lock").unlink()
    (path / "lock").symlink_to(tmp_path / "victim")
    with pytest.raises(CacheError):
        open_it(tmp_path / "tier")
    assert not (tmp_path / "victim").exists()


@pytest.mark.parametrize("text", ['{"format": 2}', '{"format": "1"}', "{}", "[]", "", "rubbish", "\0"])
def test_other_format_is_refused(tmp_path: Path, text: str) -> None:
    path = Path(open_it(tmp_path / "tier").path)
    (path / "format.json").write_text(text)
    with pytest.raises(CacheError, match=str(path)) as refused:
        open_it(tmp_path / "tier")
    assert "this dmfs knows 1" in str(refused.value)


def test_format_file_says_whose_it_is(tmp_path: Path) -> None:
    path = Path(open_it(tmp_path / "tier", source="/a/b", dataset_id="mine").path)
    assert json.loads((path / "format.json").read_text()) == {"format": 1, "source": "/a/b", "dataset_id": "mine"}
    assert list((path / "tmp").iterdir()) == []


@pytest.mark.parametrize("problem", ["file", "read-only"])
def test_tier_that_cannot_be_used(tmp_path: Path, problem: str) -> None:
    tier = tmp_path / "tier"
    if problem == "file":
        tier.touch()
    else:
        tier = Path("/proc/tier")
    with pytest.raises(CacheError, match=f"cannot use the cache {tier}"):
        open_it(tier)


# ---- locks

HOLDER = """
import sys
from dmfs.tiers.folder import open_folder
folder = open_folder(sys.argv[1], source=sys.argv[2], dataset_id=sys.argv[2])
print("locked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the dataset's folder open."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "tier"), SOURCE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def test_second_process_is_refused(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    """A20; the sentence names who holds it."""
    with pytest.raises(CacheError, match=f"in use by dmfs with pid {holder.pid} on "):
        open_it(tmp_path / "tier")


def test_other_dataset_on_the_same_tier_is_refused(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    for tier in (tmp_path / "tier", f"{tmp_path}/tier/"):
        with pytest.raises(CacheError, match=f"in use by dmfs with pid {holder.pid} on "):
            open_it(tier, source="/other", dataset_id="/other")
    open_it(tmp_path / "another tier", source="/other", dataset_id="/other")


def test_killed_holder_leaves_nothing_behind(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait(10)
    open_it(tmp_path / "tier")
    open_it(tmp_path / "tier", source="/other", dataset_id="/other")


def test_lock_with_rubbish_in_it(tmp_path: Path) -> None:
    folder = open_it(tmp_path / "tier")
    Path(folder.path, "lock").write_text("[1, 2]")
    with pytest.raises(CacheError, match="in use by another dmfs"):
        open_it(tmp_path / "tier")


def test_tier_with_a_slash_behind_it(tmp_path: Path) -> None:
    """The own folder is not taken for somebody else's, in use or in the account."""
    tier = f"{tmp_path}/tier/"
    folder = open_it(tier)
    Path(folder.path, "objects/x").write_bytes(b"1" * 8192)
    assert folder.others_allocated() == 0
    del folder
    open_it(tier)


def test_what_others_take(tmp_path: Path) -> None:
    other = open_it(tmp_path / "tier", source="/other", dataset_id="/other")
    Path(other.path, "objects/x").write_bytes(b"1" * 10_000)
    Path(other.path, "tmp/x").write_bytes(b"1" * 5000)
    fcntl.flock(other._lock.fd, fcntl.LOCK_UN)
    (tmp_path / "tier/not ours").mkdir()
    (tmp_path / "tier/not ours/objects").write_bytes(b"1" * 10_000)
    folder = open_it(tmp_path / "tier")
    wanted = sum(Path(other.path, part, "x").stat().st_blocks * 512 for part in ("objects", "tmp"))
    assert folder.others_allocated() == wanted
    shutil.rmtree(Path(other.path, "tmp"))
    assert folder.others_allocated() == Path(other.path, "objects/x").stat().st_blocks * 512


def test_clearing_what_was_left(tmp_path: Path) -> None:
    folder = open_it(tmp_path / "tier")
    tmp = Path(folder.path, "tmp")
    for name in ("a", "b.sums", "format.json"):
        (tmp / name).touch()
    (tmp / "a folder cannot be unlinked").mkdir()
    folder.clear_tmp()
    assert [path.name for path in tmp.iterdir()] == ["a folder cannot be unlinked"]
    folder.clear_tmp()
