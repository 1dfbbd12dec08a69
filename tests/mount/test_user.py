"""`dmfs mount --user`: root mounts for an ordinary user, and the daemon is that user with one capability."""

import contextlib
import json
import os
import pty
import pwd
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dmfs import disks
from dmfs.fuse import mounting
from tests.support.files import MiB, content, make_files
from tests.support.mounts import REPOSITORY, DmfsMount, MountFactory, dmfs_command, is_mounted, why_no_mounts
from tests.support.waiting import is_running, wait_until

pytestmark = [
    pytest.mark.skipif(os.geteuid() != 0 or why_no_mounts() is not None, reason="needs root and /dev/fuse"),
    pytest.mark.slow,
]

USER = pwd.getpwnam("nobody")
SIZES = [5, 300_000, 9 * MiB + 1]

# What a test has a user do comes after the imports: this Python may be in a folder that is root's alone.
AS_USER = f"""
import encodings.ascii, encodings.idna, json, multiprocessing, os, select, sys
from pathlib import Path
from dmfs.cli import bounded, checks, client, launch, main, mount, owners, status, umount
from scripts import slowfs
os.environ.pop("XDG_RUNTIME_DIR", None)
os.initgroups({USER.pw_name!r}, {USER.pw_gid})
os.setgid({USER.pw_gid})
os.setuid({USER.pw_uid})
"""


def user_command(code: str, *arguments: str) -> list[str]:
    """The command line of Python code that runs as the user, with `sys.argv[1:]`."""
    return [sys.executable, "-c", AS_USER + code, *arguments]


def as_user(code: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        user_command(code, *arguments), cwd=REPOSITORY, capture_output=True, text=True, timeout=30, check=False
    )


def dmfs_as_user(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return as_user("sys.exit(main.run(sys.argv[1:]))", *arguments)


def read_as_user(folder: Path) -> bytes:
    """The content of all files of a folder, as that user reads them."""
    done = subprocess.run(
        user_command(
            "for path in sorted(Path(sys.argv[1]).iterdir()): sys.stdout.buffer.write(path.read_bytes())", str(folder)
        ),
        cwd=REPOSITORY,
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


WHOLE = b"".join(content(number, 0, size) for number, size in enumerate(SIZES))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that the user can reach and owns; what is mounted in it goes with it."""
    with tempfile.TemporaryDirectory(prefix="dmfs-user-", dir="/tmp") as name:
        os.chown(name, USER.pw_uid, USER.pw_gid)
        yield Path(name)
        for info in reversed(mounting.mounts()):
            if info.mountpoint.startswith(f"{name}/"):
                mounting.unmount(info.mountpoint, lazy=True, force=True)
    with contextlib.suppress(OSError):  # it is not there, or has more mounts
        os.rmdir(f"/tmp/dmfs-{USER.pw_uid}")


@pytest.fixture
def dataset(folder: Path) -> Path:
    """Three files that are the user's alone, old enough that copies are published at once."""
    source = folder / "set"
    for path in (*make_files(source, SIZES), source):
        os.chown(path, USER.pw_uid, USER.pw_gid)
    source.chmod(0o700)
    return source


def capabilities(pid: int) -> dict[str, set[str]]:
    """The ids, groups and capabilities of all threads of a process."""
    found: dict[str, set[str]] = {}
    for thread in os.listdir(f"/proc/{pid}/task"):
        for line in Path(f"/proc/{pid}/task/{thread}/status").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("Uid", "Gid", "Groups", "CapEff", "CapPrm", "CapInh", "CapAmb"):
                found.setdefault(name, set()).add(" ".join(value.split()))
    return found


def assert_is_the_user(pid: int) -> None:
    """Of a daemon: every thread is that user in every respect, with CAP_SYS_ADMIN alone."""
    found = capabilities(pid)
    only, none = {f"{1 << 21:016x}"}, {f"{0:016x}"}
    assert found["Uid"] == {" ".join([str(USER.pw_uid)] * 4)}
    assert found["Gid"] == {" ".join([str(USER.pw_gid)] * 4)}
    groups = sorted(os.getgrouplist(USER.pw_name, USER.pw_gid))
    assert found["Groups"] == {" ".join(map(str, groups))}
    assert (found["CapEff"], found["CapPrm"]) == (only, only)
    assert (found["CapInh"], found["CapAmb"]) == (none, none)


def test_daemon_is_the_user_with_one_capability(dataset: Path, dmfs_mount: MountFactory) -> None:
    mount = dmfs_mount(dataset, user=USER.pw_name)
    assert read_as_user(mount.view) == WHOLE
    status = mount.wait_fills_done()
    assert status["user"] == USER.pw_name
    assert len(os.listdir(f"/proc/{mount.pid}/task")) > 1, "there are threads to look at"
    assert_is_the_user(mount.pid or 0)
    with pytest.raises(PermissionError):
        os.listdir(mount.view)  # root's own mount it is not
    found = mounting.find_mount(str(mount.view))
    assert found is not None
    assert (found.owner, found.group) == (USER.pw_uid, USER.pw_gid)
    assert Path(f"/sys/class/bdi/{found.device}/read_ahead_kb").read_text() == "512\n"
    started_with = Path(f"/proc/{mount.pid}/environ").read_bytes().split(b"\0")
    assert f"HOME={os.environ['HOME']}".encode() in started_with, "Python looks for code there, as root at first"

    looked = as_user(f"open('/proc/{mount.pid}/environ').read()")
    assert "PermissionError" in looked.stderr, "nor may the user look into it, who might find what is root's"


def test_kernel_reads_for_the_user_as_for_root(dataset: Path, dmfs_mount: MountFactory) -> None:
    as_root = dmfs_mount(dataset).status()
    mount = dmfs_mount(dataset, user=USER.pw_name)
    status = mount.status()
    assert (status["io_mode"], status["io_mode_reason"]) == (as_root["io_mode"], as_root["io_mode_reason"])
    if status["io_mode"] != "passthrough":
        pytest.skip(f"no passthrough here: {status['io_mode_reason']}")
    assert read_as_user(mount.view) == WHOLE
    mount.wait_fills_done()
    assert read_as_user(mount.view) == WHOLE
    assert mount.status()["served"]["kernel"]["opens"] >= len(SIZES)


def test_all_that_is_made_is_the_users_alone(dataset: Path, dmfs_mount: MountFactory) -> None:
    before = os.umask(0)
    try:
        mount = dmfs_mount(dataset, user=USER.pw_name)
    finally:
        os.umask(before)
    assert read_as_user(mount.view) == WHOLE
    mount.wait_fills_done()
    cache = mount.base / "cache"
    made = [cache, *cache.rglob("*"), mount.sockets, *mount.sockets.iterdir(), mount.log_path]
    assert len(made) > 10
    for path in made:
        st = path.lstat()
        assert (st.st_uid, st.st_gid) == (USER.pw_uid, USER.pw_gid), path
        assert stat.S_IMODE(st.st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_default_cache_is_the_users(dataset: Path, folder: Path, dmfs_mount: MountFactory) -> None:
    if disks.file_system(str(folder)).kind != "disk":
        pytest.skip("no local disk here that a default cache could be on")
    shared = folder / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    mount = dmfs_mount(dataset, user=USER.pw_name, caches=[], env={"TMPDIR": str(shared)})
    (tier,) = mount.status()["tiers"]
    assert tier["path"] == f"{shared}/dmfs-cache-{USER.pw_uid}"
    assert read_as_user(mount.view) == WHOLE
    assert {path.lstat().st_uid for path in Path(tier["path"]).rglob("*")} == {USER.pw_uid}


def test_user_has_the_usual_commands(dataset: Path, dmfs_mount: MountFactory) -> None:
    mount = dmfs_mount(dataset, user=USER.pw_name)
    done = dmfs_as_user("status", "--json")
    assert done.returncode == 0, done.stderr
    assert str(mount.view) in done.stdout
    done = as_user("os.chdir(sys.argv[1]); sys.exit(main.run(['umount', '.']))", str(mount.view))
    assert done.returncode == 0, done.stderr
    assert not is_mounted(mount.view)
    assert not is_running(mount.pid or 0)

    mount.start()
    done = dmfs_as_user("umount", "--force", str(mount.view))
    assert done.returncode == 0, done.stderr
    assert not is_mounted(mount.view)
    assert not is_running(mount.pid or 0)


def test_root_sees_and_unmounts_it(dataset: Path, dmfs_mount: MountFactory) -> None:
    mount = dmfs_mount(dataset, user=USER.pw_name)
    own = dmfs_mount(dataset, base=mount.base, mountpoint=mount.base / "own", caches=[mount.base / "own-cache"])
    both = [str(own.view), str(mount.view)]
    done = mount.command("status", "--json")
    assert done.returncode == 0, done.stderr
    assert [shown["mountpoint"] for shown in json.loads(done.stdout) if shown["mountpoint"] in both] == both
    for path in both:
        assert json.loads(mount.command("status", "--json", path).stdout)["mountpoint"] == path
    mount.umount()  # by root
    assert not is_running(mount.pid or 0)
    mount.start()
    mount.send_signal(signal.SIGSTOP)
    mount.umount("--force")
    assert str(mount.view) not in dmfs_as_user("status", "--json").stdout


def test_root_warms_it(dataset: Path, dmfs_mount: MountFactory) -> None:
    """As that user, of whom it may be that he cannot read the code: that of the progress bar is loaded late."""
    mount = dmfs_mount(dataset, user=USER.pw_name, way="pagecache")
    terminal, theirs = pty.openpty()
    process = subprocess.Popen(
        dmfs_command("warm", str(mount.view), ".", "--push"),
        env=mount.environment | {"TERM": "xterm"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    os.close(theirs)
    said, _ = process.communicate(timeout=30)
    shown = os.read(terminal, 65536).decode()
    os.close(terminal)
    assert process.returncode == 0, shown
    assert f"{len(SIZES)} files" in said
    assert f"{len(SIZES)} copied now, 0 there before; {len(SIZES)} pushed into memory." in said
    assert f"/{len(SIZES)}" in shown
    assert read_as_user(mount.view) == WHOLE
    assert mount.status()["served"]["local"]["reads"] == 0


def test_killed_and_mounted_again(dataset: Path, dmfs_mount: MountFactory) -> None:
    mount = dmfs_mount(dataset, user=USER.pw_name)
    mount.kill()
    done = mount.command(*mount.mount_arguments())
    assert done.returncode == 0, done.stderr
    assert f"the dead mount at {mount.view} (its daemon is gone) was unmounted first" in done.stderr
    mount.note_daemon()
    assert read_as_user(mount.view) == WHOLE
    mount.kill()
    mount.umount()  # by root, of a dead one
    mount.start()


def test_foreground(dataset: Path, dmfs_mount: MountFactory) -> None:
    mount = dmfs_mount.prepare(dataset, user=USER.pw_name)
    process = mount.spawn(*mount.mount_arguments(), "--foreground")

    def answers() -> bool:
        assert process.poll() is None, process.communicate()[1]
        with contextlib.suppress(OSError):
            return bool(mount.note_daemon())
        return False

    wait_until(answers, 20, "the foreground mount answers")
    assert mount.pid == process.pid
    assert read_as_user(mount.view) == WHOLE
    assert_is_the_user(process.pid)
    mount.umount()
    assert process.wait(10) == 0


@contextlib.contextmanager
def users_own_source(directory: Path, mountpoint: Path) -> Iterator[Path]:
    """A FUSE file system of the user's, which root may not enter; for root it is as one with root_squash."""
    mountpoint.mkdir()
    os.chown(mountpoint, USER.pw_uid, USER.pw_gid)
    arguments = ["--foreground", "--age", "864000", str(directory), str(mountpoint)]
    process = subprocess.Popen(
        user_command("slowfs.main(sys.argv[1:])", *arguments), cwd=REPOSITORY, stdout=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline(), "the source does not answer"
            yield mountpoint
        finally:
            process.terminate()
            process.wait(10)


@pytest.mark.usefixtures("open_fuse_device")
def test_source_that_root_may_not_read(dataset: Path, folder: Path, dmfs_mount: MountFactory) -> None:
    with users_own_source(dataset, folder / "squashed") as source:
        with pytest.raises(PermissionError):
            os.listdir(source)
        refused = dmfs_mount.prepare(source)
        done = refused.command(*refused.mount_arguments())
        assert (done.returncode, done.stderr.count("\n")) == (4, 1), done.stderr
        assert f"the source {source} may not be read by this user" in done.stderr

        mount = dmfs_mount(source, user=USER.pw_name)
        assert read_as_user(mount.view) == WHOLE
        assert mount.status()["errors"] == []
        mount.remount()
        assert read_as_user(mount.view) == WHOLE
        mount.umount()


def test_device_that_is_roots_alone(dataset: Path, dmfs_mount: MountFactory) -> None:
    mount = dmfs_mount.prepare(dataset, user=USER.pw_name)
    device = "mount -t tmpfs -o mode=755 none /dev && mknod -m 666 /dev/null c 1 3 && mknod -m 600 /dev/fuse c 10 229"
    script = f'{device} && "$@" && shift 3 && exec "$0" -m dmfs umount "$DMFS_TEST_VIEW"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script, sys.executable, *dmfs_command(*mount.mount_arguments())],
        env={**mount.environment, "DMFS_TEST_VIEW": str(mount.view)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert "is mounted at" in done.stdout


def test_dry_run(dataset: Path, dmfs_mount: MountFactory) -> None:
    mount = dmfs_mount.prepare(dataset, user=USER.pw_name)
    mount.environment["DMFS_USER"] = str(USER.pw_uid)
    arguments = [word for word in mount.mount_arguments() if word not in ("--user", USER.pw_name)]
    done = mount.command(*arguments, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert ["user", USER.pw_name, "(DMFS_USER)"] in [line.split() for line in done.stdout.splitlines()]
    assert not is_mounted(mount.view)


def unknown_user(mount: DmfsMount) -> list[str]:
    return ["--user", "no-such-user"]


def root_itself(mount: DmfsMount) -> list[str]:
    return ["--user", "root"]


def library_front_end(mount: DmfsMount) -> list[str]:
    return ["--front-end", "pyfuse3", "--io", "auto"]


def source_of_roots(mount: DmfsMount) -> list[str]:
    mount.source.chmod(0o700)
    os.chown(mount.source, 0, 0)
    return []


def cache_of_roots(mount: DmfsMount) -> list[str]:
    (mount.base / "cache").mkdir(mode=0o700)
    return []


def cache_of_another(mount: DmfsMount) -> list[str]:
    (mount.base / "cache").mkdir()
    os.chown(mount.base / "cache", 4711, 4711)
    (mount.base / "cache").chmod(0o777)
    return []


def log_of_roots(mount: DmfsMount) -> list[str]:
    mount.log_path.touch(0o600)
    return []


def led_astray(mount: DmfsMount) -> list[str]:
    elsewhere = mount.base / "roots"
    elsewhere.mkdir()
    mount.view.rmdir()
    mount.view.symlink_to(elsewhere)
    return []


MISTAKES = {
    unknown_user: (3, "--user: user cannot be 'no-such-user': this node knows no such user"),
    root_itself: (3, "--user: user cannot be 'root': it should be an ordinary user"),
    library_front_end: (3, "the front end pyfuse3 cannot mount for another user: leave out --user"),
    source_of_roots: (4, "the source {source} may not be read by this user"),
    cache_of_roots: (6, "the cache {base}/cache is not writable by this user"),
    cache_of_another: (6, "the cache {base}/cache belongs to user 4711"),
    log_of_roots: (3, "{base}/mnt.log is not writable by this user"),
    led_astray: (5, "the mountpoint {base}/mnt is {base}/roots, where this user may not write"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_get_one_sentence(dataset: Path, dmfs_mount: MountFactory, mistake: Callable) -> None:
    mount = dmfs_mount.prepare(dataset, user=USER.pw_name)
    code, sentence = MISTAKES[mistake]
    arguments = mistake(mount)
    done = mount.command(*mount.mount_arguments(), *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (code, 1), done.stderr
    assert sentence.format(source=dataset, base=mount.base) in done.stderr
    assert not is_mounted(mount.view)
    assert dmfs_as_user("status", str(mount.view)).returncode == 8, "a daemon was left behind"


@pytest.mark.parametrize("where", ["--user", "DMFS_USER"])
def test_ordinary_users_mount_for_themselves_only(dataset: Path, folder: Path, where: str) -> None:
    (folder / "mnt").mkdir()
    code = "sys.exit(main.run(['mount', *sys.argv[1:]]))"
    arguments = [str(dataset), str(folder / "mnt")]
    if where == "--user":
        arguments += ["--user", "daemon"]
    else:
        code = "os.environ['DMFS_USER'] = 'daemon'; " + code
    done = as_user(code, *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (3, 1), done.stderr
    assert f"{where}: only root can mount for the user daemon" in done.stderr


def test_root_without_the_capability(dataset: Path, dmfs_mount: MountFactory) -> None:
    mount = dmfs_mount.prepare(dataset, user=USER.pw_name)
    done = subprocess.run(
        ["setpriv", "--bounding-set", "-sys_admin", *dmfs_command(*mount.mount_arguments())],
        env=mount.environment,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stderr.count("\n")) == (7, 1), done.stderr
    assert "this root may not mount for the user" in done.stderr
