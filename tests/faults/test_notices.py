"""What the kernel is told unasked, against what it asks at the same time: pushes beside readers of the same cold file,
changed names beside look-ups. The kernel makes such notices wait for unanswered requests: the fault would be a stall.
"""

import contextlib
import errno
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path

import pytest

from dmfs.cli.client import WarmRun
from dmfs.errors import UserError
from dmfs.metrics import WarmProgress
from dmfs.runtime import MountRecord
from tests.doubles.badsrc import BadSource
from tests.support.files import KiB, MiB, content, drop_pages, expect_content, make_files, write_file
from tests.support.mounts import REPOSITORY, DmfsMount, MountFactory
from tests.support.waiting import wait_until

ROUND_LIMIT = 10.0  # seconds for what takes milliseconds: more is a stall

READER = """
import errno, os, sys
from tests.support.files import content
view, version_may_change = sys.argv[1], sys.argv[2] == "changing"
for line in sys.stdin:
    number, size, round = (int(word) for word in line.split())
    if version_may_change:
        try:
            os.stat(f"{view}/missing-{os.getpid()}-{round}")
        except FileNotFoundError:
            pass
    try:
        with open(f"{view}/{number:05d}.bin", "rb", buffering=0) as file:
            data = file.read()
    except OSError as exc:
        print("stale" if version_may_change and exc.errno == errno.ESTALE else repr(exc), flush=True)
        continue
    versions = range(round + 1) if version_may_change else [0]
    good = any(data == content(number, 0, size, version) for version in reversed(versions))
    print("good" if good else f"wrong bytes: {len(data)} of {size}", flush=True)
"""


class Readers:
    """Processes that read a file each time they are told to, and check its bytes."""

    def __init__(self, view: Path, count: int, *, changing: bool = False) -> None:
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-c", READER, str(view), "changing" if changing else "fixed"],
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                bufsize=1,
            )
            for _ in range(count)
        ]

    def start(self, number: int, size: int, round: int = 0) -> None:
        """All read this file now."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{number} {size} {round}\n")
            process.stdin.flush()

    def answers(self) -> list[str]:
        """What each found. Fails if one does not come back."""
        found = []
        for process in self.processes:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], ROUND_LIMIT)
            assert ready, f"reader {process.pid} stalls"
            found.append(process.stdout.readline().strip())
        return found

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def readers_of(mount: DmfsMount, count: int, *, changing: bool = False) -> Iterator[Readers]:
    readers = Readers(mount.view, count, changing=changing)
    try:
        yield readers
    finally:
        readers.close()


def warm_run(mount: DmfsMount) -> WarmRun:
    """What `dmfs warm` has as its end of the control socket."""
    assert mount.pid is not None
    name = blake2b(os.fsencode(mount.view), digest_size=8).hexdigest() + ".sock"
    return WarmRun(MountRecord(str(mount.view), str(mount.source), mount.pid, 0.0, str(mount.runtime / "dmfs" / name)))


def push(run: WarmRun, mount: DmfsMount, names: list[str]) -> WarmProgress:
    """As `dmfs warm --push`: look the files up, then have them pushed."""
    for name in names:
        os.lstat(mount.view / name)
    return run.warm([name.encode() for name in names], push=True, on_progress=lambda progress: None)


SIZES = [5000, 128 * KiB + 1, 300 * KiB]


def push_beside_readers(tmp_path: Path, dmfs_mount: MountFactory, rounds: int) -> None:
    sizes = [SIZES[number % len(SIZES)] for number in range(rounds)]
    make_files(tmp_path / "set", sizes)
    mount = dmfs_mount(tmp_path / "set", way="pagecache")
    pushed = 0
    with readers_of(mount, 8) as readers, warm_run(mount) as run:
        for number, size in enumerate(sizes):
            readers.start(number, size)
            progress = push(run, mount, [f"{number:05d}.bin"])
            assert (progress.files, progress.failures, progress.no_memory) == (1, 0, 0), progress
            pushed += progress.pushed
            assert readers.answers() == ["good"] * 8
    status = mount.status()
    assert status["pushes"]["files"] == pushed
    assert pushed > rounds // 20, "hardly anything was pushed beside its readers, so this shows nothing"
    assert (status["surprises"], status["errors"]) == (0, [])
    assert status["source"]["bytes"] == sum(sizes), "each byte was read once, whoever asked"


@pytest.mark.slow
def test_a_push_beside_eight_readers_of_the_same_cold_file(tmp_path: Path, dmfs_mount: MountFactory) -> None:
    push_beside_readers(tmp_path, dmfs_mount, 150)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_thousand_pushes_beside_eight_readers(tmp_path: Path, dmfs_mount: MountFactory) -> None:
    push_beside_readers(tmp_path, dmfs_mount, 1000)


def change_beside_look_ups(tmp_path: Path, dmfs_mount: MountFactory, rounds: int) -> None:
    """Files are rewritten in place while they are read and while names of their directory are looked up.

    Nothing is cached, so a reader of the version before must hear that it is gone.
    """
    size, files = 40 * KiB, 20
    folder = tmp_path / "set"
    make_files(folder, [size] * files)
    no_room = [f"{tmp_path / 'cache'}:4096"]
    mount = dmfs_mount(folder, way="pagecache", immutable=False, caches=no_room, flags=["--metadata-ttl", "3600"])
    stale = 0
    with readers_of(mount, 6, changing=True) as readers:
        for round in range(rounds):
            number = round % files
            readers.start(number, size, round)
            with (folder / f"{number:05d}.bin").open("r+b", buffering=0) as file:
                assert file.write(content(number, 0, size, round)) == size
            drop_pages(mount.view / f"{number:05d}.bin")  # or the kernel would go on with what it has
            answers = readers.answers()
            assert set(answers) <= {"good", "stale"}, answers
            stale += answers.count("stale")
    assert stale, "no reader ever met a change, so no name was invalidated"
    # The last version of each file is seen, at the second look at the latest.
    for number in range(files):
        last = max(round for round in range(rounds) if round % files == number)
        view = mount.view / f"{number:05d}.bin"

        def shows_the_last(view: Path = view, number: int = number, last: int = last) -> bool:
            drop_pages(view)
            try:
                expect_content(view.read_bytes(), number, 0, size, last)
            except (OSError, AssertionError):
                return False
            return True

        assert wait_until(shows_the_last, 5, f"file {number} shows version {last}") or True
    assert mount.status()["surprises"] == 0


@pytest.mark.slow
def test_names_that_change_while_their_directory_is_looked_into(tmp_path: Path, dmfs_mount: MountFactory) -> None:
    change_beside_look_ups(tmp_path, dmfs_mount, 60)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_two_hundred_changes_beside_look_ups(tmp_path: Path, dmfs_mount: MountFactory) -> None:
    change_beside_look_ups(tmp_path, dmfs_mount, 200)


def test_a_look_up_that_hangs_holds_up_no_other(
    tmp_path: Path, bad_source: Callable[..., BadSource], dmfs_mount: MountFactory
) -> None:
    """A name has changed, but in its directory somebody waits for the source: the notice waits too, and nobody else."""
    folder = tmp_path / "set"
    make_files(folder, [40 * KiB] * 3)
    source = bad_source(folder)
    mount = dmfs_mount(source.mountpoint, way="pagecache", immutable=False, flags=["--metadata-ttl", "3600"])
    view = mount.view / "00000.bin"
    os.stat(view)
    write_file(folder / "00000.bin", 0, 30 * KiB, version=1)
    source.rule("LOOKUP", "00001.bin", hangs=True)
    hanging = in_process("os.stat(path)", mount.view / "00001.bin")
    try:
        wait_until(lambda: source.hanging(), 10, "a look-up waits for the source")
        assert in_process(READ, view).wait(ROUND_LIMIT) == errno.ESTALE
        assert in_process("os.stat(path)", mount.view / "00002.bin").wait(ROUND_LIMIT) == 0
    finally:
        source.clear()
        assert hanging.wait(20) == 0
    wait_until(lambda: in_process(READ, view).wait(ROUND_LIMIT) == 0, 10, "the new version is seen")
    expect_content(view.read_bytes(), 0, 0, 30 * KiB, version=1)


READ = "open(path, 'rb').read()"


def in_process(code: str, path: Path) -> "subprocess.Popen[bytes]":
    """Run an expression of `path` in a process, as one that hangs can only be killed. It ends with the errno."""
    program = f"import os, sys\npath = sys.argv[1]\ntry: {code}\nexcept OSError as exc: sys.exit(exc.errno)"
    return subprocess.Popen([sys.executable, "-c", program, str(path)])


@pytest.mark.parametrize("way", ["pagecache", "plain"])
def test_a_pushed_file_is_read_without_a_message(tmp_path: Path, dmfs_mount: MountFactory, way: str) -> None:
    sizes = [1, 4096, 100_001, 3 * MiB + 5, 40 * MiB]
    make_files(tmp_path / "set", sizes)
    mount = dmfs_mount(tmp_path / "set", way=way)
    with warm_run(mount) as run:
        progress = push(run, mount, [f"{number:05d}.bin" for number in range(len(sizes))])
    assert (progress.pushed, progress.pushed_bytes, progress.fetched) == (len(sizes), sum(sizes), len(sizes))
    before = mount.status()["served"]
    for number, size in enumerate(sizes):
        expect_content((mount.view / f"{number:05d}.bin").read_bytes(), number, 0, size)
    after = mount.status()["served"]
    assert {place: after[place]["reads"] for place in after if place != "kernel"} == {
        place: before[place]["reads"] for place in before if place != "kernel"
    }
    assert mount.status()["pushes"] == {"files": len(sizes), "bytes": sum(sizes)}


def test_nothing_is_pushed_where_the_kernel_reads_the_copies(tmp_path: Path, dmfs_mount: MountFactory) -> None:
    make_files(tmp_path / "set", [5000])
    mount = dmfs_mount(tmp_path / "set", way="passthrough")
    with warm_run(mount) as run, pytest.raises(UserError, match="warm without --push") as refusal:
        push(run, mount, ["00000.bin"])
    assert refusal.value.exit_code == 3
    with warm_run(mount) as run:
        assert run.warm([b"00000.bin"], push=False, on_progress=lambda progress: None).fetched == 1
    assert mount.copies()


def test_a_daemon_that_is_stopped_in_mid_push_ends(tmp_path: Path, dmfs_mount: MountFactory) -> None:
    make_files(tmp_path / "set", [200 * MiB])
    mount = dmfs_mount(tmp_path / "set", way="pagecache")
    os.lstat(mount.view / "00000.bin")
    pushing = mount.spawn("warm", str(mount.view), "00000.bin", "--push")
    wait_until(lambda: mount.status()["fills"]["active"] or mount.status()["fills"]["done"], 10, "it has begun")
    mount.umount("--force")
    assert pushing.wait(10) != 0
    with pytest.raises(OSError, match=os.strerror(errno.ENOENT)):
        os.stat(mount.view / "00000.bin")
