"""Mounting, unmounting, and what may go wrong in between: cases E01, E09, E11, E21."""

import contextlib
import errno
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.mount.posix.target import raises_errno
from tests.support.files import KiB, MiB, expect_content, make_files
from tests.support.mounts import DmfsMount, MountFactory, dmfs_command, is_mounted, mount_count
from tests.support.waiting import ended_within, wait_until

SIZES = [0, 5, 300_000, 9 * MiB + 1]  # the last is larger than what is copied before an open returns

EXIT_CONFIG, EXIT_SOURCE, EXIT_MOUNTPOINT, EXIT_CACHE, EXIT_NOT_MOUNTED = 3, 4, 5, 6, 8  # dmfs/errors.py, documented


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """A folder of four self-describing files."""
    folder = tmp_path / "dataset"
    make_files(folder, SIZES)
    return folder


def read_all(view: Path) -> None:
    """Read every file of the dataset and check it."""
    for number, size in enumerate(SIZES):
        expect_content((view / f"{number:05d}.bin").read_bytes(), number, 0, size)


def assert_plain_again(mount: DmfsMount) -> None:
    """The mountpoint is an ordinary empty folder, and can be written to."""
    assert mount_count(mount.view) == 0
    assert os.listdir(mount.view) == []
    (mount.view / "probe").write_bytes(b"")
    (mount.view / "probe").unlink()


def assert_refused(done: subprocess.CompletedProcess[str], code: int, *names: object) -> None:
    """It failed with this exit code and one sentence on standard error that has these names in it."""
    assert done.returncode == code, f"exit code {done.returncode}, not {code}: {done.stderr}{done.stdout}"
    assert "Traceback" not in done.stderr, done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, f"not one sentence: {done.stderr!r}"
    for name in names:
        assert str(name) in lines[0], f"the sentence does not name {name}: {lines[0]}"


def start_in_background(mount: DmfsMount) -> None:
    mount.start()


def start_from_a_thread(mount: DmfsMount) -> None:
    thread = threading.Thread(target=mount.start)
    thread.start()
    thread.join(40)
    assert not thread.is_alive(), "mounting from a thread hangs"


def start_in_foreground(mount: DmfsMount) -> subprocess.Popen[str]:
    """Start `dmfs mount -f` and wait until its control socket answers."""
    process = mount.spawn(*mount.mount_arguments(), "--foreground")

    def answers() -> bool:
        assert process.poll() is None, f"it ended with {process.returncode}: {process.communicate()[1]}"
        with contextlib.suppress(OSError):
            return bool(mount.note_daemon())
        return False

    wait_until(answers, 20, "the foreground mount answers")
    return process


@pytest.mark.parametrize("start", [start_in_background, start_from_a_thread, start_in_foreground])
def test_first_operation_is_a_cold_read(dataset: Path, dmfs_mount: MountFactory, start: Callable) -> None:
    mount = dmfs_mount.prepare(dataset)
    process = start(mount)
    read_all(mount.view)
    status = mount.wait_fills_done()
    assert status["fills"]["done"] >= 2, "nothing was copied"
    assert status["source"]["bytes"] == sum(SIZES), "each byte is read once at the source"
    assert status["errors"] == []
    mount.umount()
    if process:
        out, err = process.communicate(timeout=10)
        assert (process.returncode, err) == (0, ""), out
    assert_plain_again(mount)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_a_foreground_mount(dataset: Path, dmfs_mount: MountFactory, number: signal.Signals) -> None:
    mount = dmfs_mount.prepare(dataset)
    process = start_in_foreground(mount)
    read_all(mount.view)
    process.send_signal(number)
    _, err = process.communicate(timeout=10)
    assert "Traceback" not in err
    assert process.returncode in (0, 128 + number, -number), err
    assert_plain_again(mount)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_a_background_mount(dataset: Path, dmfs_mount: MountFactory, number: signal.Signals) -> None:
    mount = dmfs_mount(dataset)
    read_all(mount.view)
    mount.send_signal(number)
    wait_until(lambda: not mount.is_alive(), 10, f"the daemon has ended by {number.name}")
    assert_plain_again(mount)


def mount_read_unmount(mount: DmfsMount, rounds: int) -> None:
    for _ in range(rounds):
        mount.start()
        expect_content((mount.view / "00001.bin").read_bytes(), 1, 0, SIZES[1])
        mount.umount()
        assert_plain_again(mount)


@pytest.mark.slow
def test_mount_read_unmount(dataset: Path, dmfs_mount: MountFactory) -> None:
    mount_read_unmount(dmfs_mount.prepare(dataset), 5)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_mount_read_unmount_200_times(dataset: Path, dmfs_mount: MountFactory) -> None:
    mount_read_unmount(dmfs_mount.prepare(dataset), 200)


def test_second_mount_on_the_same_mountpoint(dataset: Path, tmp_path: Path, dmfs_mount: MountFactory) -> None:
    mount = dmfs_mount(dataset)
    pid = mount.pid
    assert_refused(mount.command(*mount.mount_arguments()), EXIT_MOUNTPOINT, mount.view, "already mounted")
    other = tmp_path / "other"
    make_files(other, [10])
    another = mount.command("mount", str(other), str(mount.view), "--cache", str(mount.base / "cache-2"))
    assert_refused(another, EXIT_MOUNTPOINT, mount.view, "already mounted")
    read_all(mount.view)
    assert mount.note_daemon() == pid, "another daemon took over"
    assert mount_count(mount.view) == 1
    mount.umount()
    assert_plain_again(mount)


def test_two_mounts_on_one_mountpoint_at_the_same_instant(dataset: Path, dmfs_mount: MountFactory) -> None:
    mount = dmfs_mount.prepare(dataset)
    both = [mount.spawn(*mount.mount_arguments()) for _ in range(2)]
    errors = [process.communicate(timeout=30)[1] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, EXIT_MOUNTPOINT], f"exit codes {codes}: {errors}"
    mount.note_daemon()
    assert "already mounted" in errors[codes.index(EXIT_MOUNTPOINT)]
    read_all(mount.view)
    assert mount_count(mount.view) == 1
    mount.umount()
    assert_plain_again(mount)


def test_one_source_at_two_mountpoints(dataset: Path, dmfs_mount: MountFactory) -> None:
    first = dmfs_mount(dataset)
    second = dmfs_mount(dataset, base=first.base, mountpoint=first.base / "mnt-2", caches=[first.base / "cache-2"])
    assert first.pid != second.pid
    read_all(first.view)
    read_all(second.view)
    first.umount()
    assert_plain_again(first)
    read_all(second.view)


def test_cache_in_use_is_refused(dataset: Path, dmfs_mount: MountFactory) -> None:
    first = dmfs_mount(dataset)
    second = dmfs_mount.prepare(dataset, base=first.base, mountpoint=first.base / "mnt-2")
    assert_refused(second.command(*second.mount_arguments()), EXIT_CACHE, first.base / "cache")
    assert_plain_again(second)
    read_all(first.view)
    first.umount()
    second.start()
    read_all(second.view)
    assert second.status()["source"]["bytes"] == 0, "the copies of the first mount were not used"


def test_eight_mounts_at_the_same_instant(dataset: Path, dmfs_mount: MountFactory) -> None:
    mounts = [dmfs_mount.prepare(dataset)]
    base = mounts[0].base
    mounts += [
        dmfs_mount.prepare(dataset, base=base, mountpoint=base / f"mnt-{i}", caches=[base / f"cache-{i}"])
        for i in range(1, 8)
    ]
    processes = [mount.spawn(*mount.mount_arguments()) for mount in mounts]
    errors = [process.communicate(timeout=60)[1] for process in processes]
    assert [process.returncode for process in processes] == [0] * 8, errors
    for mount in mounts:
        mount.note_daemon()
        expect_content((mount.view / "00002.bin").read_bytes(), 2, 0, SIZES[2])
    listed = mounts[0].command("status", "--json")
    assert all(str(mount.view) in listed.stdout for mount in mounts), listed


def test_mount_after_kill_mends_the_dead_mount(dataset: Path, dmfs_mount: MountFactory) -> None:
    mount = dmfs_mount(dataset)
    read_all(mount.view)
    mount.wait_fills_done()
    mount.kill()
    assert is_mounted(mount.view)
    with raises_errno(errno.ENOTCONN, errno.ECONNABORTED):
        os.listdir(mount.view)
    mount.start()
    assert mount_count(mount.view) == 1, "the dead mount is still below the new one"
    read_all(mount.view)
    status = mount.status()
    assert (status["source"]["opens"], status["source"]["bytes"]) == (0, 0), "copies did not survive the kill"


@pytest.mark.parametrize("flags", [[], ["--force"]])
def test_umount_after_kill(dataset: Path, dmfs_mount: MountFactory, flags: list[str]) -> None:
    mount = dmfs_mount(dataset)
    mount.kill()
    mount.umount(*flags)
    assert_plain_again(mount)
    assert_refused(mount.command("umount", str(mount.view)), EXIT_NOT_MOUNTED, mount.view)


def test_umount_names_who_keeps_it_busy(dataset: Path, dmfs_mount: MountFactory) -> None:
    mount = dmfs_mount(dataset)
    with (mount.view / "00002.bin").open("rb") as file:
        done = mount.command("umount", str(mount.view))
        assert_refused(done, 9, mount.view, os.getpid())
        expect_content(file.read(), 2, 0, SIZES[2])
    mount.umount()


def test_forced_umount_of_a_busy_mount(dataset: Path, dmfs_mount: MountFactory) -> None:
    mount = dmfs_mount(dataset)
    with (mount.view / "00003.bin").open("rb", buffering=0) as file:
        assert file.read(10)
        mount.umount("--force")
        with raises_errno(errno.ENOTCONN, errno.ECONNABORTED, errno.EIO):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            os.pread(file.fileno(), 10, 8 * MiB)
    assert_plain_again(mount)


def test_dry_run_mounts_nothing(dataset: Path, dmfs_mount: MountFactory) -> None:
    mount = dmfs_mount.prepare(dataset)
    done = mount.command(*mount.mount_arguments(), "--dry-run")
    assert done.returncode == 0, done.stderr
    assert str(mount.base / "cache") in done.stdout
    assert not (mount.base / "cache").exists()
    assert_plain_again(mount)


def _missing_source(mount: DmfsMount) -> list[str]:
    return [f"{mount.source}/nowhere", str(mount.view)]


def _source_is_a_file(mount: DmfsMount) -> list[str]:
    return [f"{mount.source}/00001.bin", str(mount.view)]


def _missing_mountpoint(mount: DmfsMount) -> list[str]:
    return [str(mount.source), f"{mount.base}/nowhere"]


def _mountpoint_is_a_file(mount: DmfsMount) -> list[str]:
    (mount.base / "file").write_bytes(b"")
    return [str(mount.source), f"{mount.base}/file"]


def _mountpoint_not_empty(mount: DmfsMount) -> list[str]:
    (mount.base / "full").mkdir()
    (mount.base / "full/something").write_bytes(b"")
    return [str(mount.source), f"{mount.base}/full"]


def _mountpoint_is_the_source(mount: DmfsMount) -> list[str]:
    return [str(mount.source), str(mount.source)]


def _mountpoint_in_the_source(mount: DmfsMount) -> list[str]:
    (mount.source / "empty").mkdir()
    return [str(mount.source), f"{mount.source}/empty"]


def _source_in_the_mountpoint(mount: DmfsMount) -> list[str]:
    return [str(mount.source), str(mount.source.parent)]


def _cache_in_the_mountpoint(mount: DmfsMount) -> list[str]:
    return [str(mount.source), str(mount.view), "--cache", f"{mount.view}/cache"]


def _bad_size(mount: DmfsMount) -> list[str]:
    return [str(mount.source), str(mount.view), "--cache", f"{mount.base}/cache:12parsecs"]


def _bad_yaml(mount: DmfsMount) -> list[str]:
    (mount.base / "bad.yaml").write_text("cache: [unclosed\n")
    return [str(mount.source), str(mount.view), "--config", f"{mount.base}/bad.yaml"]


def _unknown_key(mount: DmfsMount) -> list[str]:
    (mount.base / "odd.yaml").write_text("immutable: true\nmetadata_tll: 5\n")
    return [str(mount.source), str(mount.view), "--config", f"{mount.base}/odd.yaml"]


MISTAKES: dict[Callable[[DmfsMount], list[str]], tuple[int, str]] = {
    _missing_source: (EXIT_SOURCE, "{source}/nowhere"),
    _source_is_a_file: (EXIT_SOURCE, "{source}/00001.bin"),
    _missing_mountpoint: (EXIT_MOUNTPOINT, "{base}/nowhere"),
    _mountpoint_is_a_file: (EXIT_MOUNTPOINT, "{base}/file"),
    _mountpoint_not_empty: (EXIT_MOUNTPOINT, "{base}/full"),
    _mountpoint_is_the_source: (EXIT_MOUNTPOINT, "{source}"),
    _mountpoint_in_the_source: (EXIT_MOUNTPOINT, "{source}/empty"),
    _source_in_the_mountpoint: (EXIT_MOUNTPOINT, "{source}"),
    _cache_in_the_mountpoint: (EXIT_MOUNTPOINT, "{view}/cache"),
    _bad_size: (EXIT_CONFIG, "12parsecs"),
    _bad_yaml: (EXIT_CONFIG, "bad.yaml"),
    _unknown_key: (EXIT_CONFIG, "metadata_tll"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_get_one_sentence(dataset: Path, dmfs_mount: MountFactory, mistake: Callable) -> None:
    mount = dmfs_mount.prepare(dataset)
    arguments = mistake(mount)
    if "--cache" not in arguments and "--config" not in arguments:
        arguments += ["--cache", f"{mount.base}/cache"]
    code, name = MISTAKES[mistake]
    done = mount.command("mount", *arguments)
    assert_refused(done, code, name.format(source=dataset, base=mount.base, view=mount.view))
    assert not is_mounted(Path(arguments[1]))
    assert mount.command("status", "--json").stdout.strip() == "[]", "a daemon was left behind"


def test_mount_fails_without_dev_fuse(dataset: Path, dmfs_mount: MountFactory) -> None:
    if os.geteuid() != 0:
        pytest.skip("a mount namespace of one's own needs root")
    mount = dmfs_mount.prepare(dataset)
    hide = 'mount -t tmpfs none /dev && mknod -m 666 /dev/null c 1 3 && exec "$@"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", hide, "sh", *dmfs_command(*mount.mount_arguments())],
        env=mount.environment,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert_refused(done, 7, "/dev/fuse")


def test_stopped_daemon_does_not_hang_the_commands(dataset: Path, dmfs_mount: MountFactory) -> None:
    mount = dmfs_mount(dataset)
    other = dmfs_mount(dataset, base=mount.base, mountpoint=mount.base / "mnt-2", caches=[mount.base / "cache-2"])
    mount.send_signal(signal.SIGSTOP)
    try:
        done = mount.command("status", str(mount.view), timeout=5)
        assert "does not answer" in done.stdout + done.stderr, done
        read_all(other.view)
    finally:
        mount.send_signal(signal.SIGCONT)
    read_all(mount.view)


def test_killed_reader_leaves_no_request_behind(dataset: Path, dmfs_mount: MountFactory) -> None:
    mount = dmfs_mount(dataset)
    reader = subprocess.Popen(["cat", mount.view / "00003.bin"], stdout=subprocess.PIPE)
    assert reader.stdout
    assert reader.stdout.read(4 * KiB)
    reader.kill()
    reader.wait(10)
    reader.stdout.close()
    wait_until(lambda: not mount.status()["waiting"], 10, "no read is waited for")
    pidfd = os.pidfd_open(mount.pid or 0)
    mount.umount()
    assert ended_within(pidfd, 0)
    os.close(pidfd)
