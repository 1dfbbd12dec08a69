"""Real mounts for tests: dmfs in a process of its own, and the native read-only bind mount that is its oracle.

Every mount has its own folder below /tmp for runtime directory, cache, log and mountpoint, and is always taken down
again, however the test went. Nothing here looks at a mountpoint through the file system to find out about its state:
that could hang.
"""

import contextlib
import json
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from tests.support.waiting import ended_within, open_pidfd, wait_until

REPOSITORY = Path(__file__).parents[2]
WAYS = ["passthrough", "pagecache", "plain", "pyfuse3"]
"""How bytes can get to readers: the modes of our own front end, and the library's, which has one."""
COMMAND_TIMEOUT = 30.0  # seconds for one dmfs command; a hang of it fails the test with the log
LOG_TAIL = 4000  # characters of the log shown with a failure

live_mounts: list["DmfsMount"] = []
"""Mounts not yet closed, oldest first: conftest.py shows their logs with a failed test."""


def why_no_mounts() -> str | None:
    """Why this machine cannot mount FUSE file systems at all, or None if it can."""
    if not os.path.exists("/dev/fuse"):
        return "no /dev/fuse here"
    if os.geteuid() == 0:
        return None if _has_sys_admin() else "root without CAP_SYS_ADMIN cannot mount"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse is not open to this user"
    return None if shutil.which("fusermount3") else "no fusermount3, and not root"


def why_no_bind_mounts() -> str | None:
    """Why this process cannot make a bind mount, or None if it can."""
    return None if os.geteuid() == 0 and _has_sys_admin() else "a bind mount needs root with CAP_SYS_ADMIN"


def _has_sys_admin() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> 21 & 1)
    return False


def is_mounted(path: Path) -> bool:
    """Whether something is mounted exactly there, by /proc/self/mountinfo."""
    return mount_count(path) > 0


def mount_count(path: Path) -> int:
    """How many mounts lie on top of each other exactly there."""
    wanted = os.fsencode(path)
    lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    return sum(line.split()[4].decode("unicode_escape").encode("latin-1") == wanted for line in lines)


@contextlib.contextmanager
def tmpfs(path: Path, size: str) -> Iterator[Path]:
    """A tmpfs of `size` (as in `8m`) on the new folder `path`; gone after the block."""
    path.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", path], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@contextlib.contextmanager
def read_only_bind(source: Path) -> Iterator[Path]:
    """A native read-only view of `source`: the oracle of every mount test."""
    base = Path(tempfile.mkdtemp(prefix="dm-", dir="/tmp"))
    view = base / "mnt"
    view.mkdir()
    subprocess.run(["mount", "--bind", source, view], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", view], check=True)
        yield view
    finally:
        subprocess.run(["umount", "-l", view], check=True)
        view.rmdir()
        base.rmdir()


class DmfsMount:
    """One dmfs mount of a test: command line, control socket, daemon process, clean-up.

    Attributes:
        base: a short folder below /tmp (paths of Unix sockets are at most 108 bytes) that holds all the rest.
        view: the mountpoint.
        sockets: the folder of the lock file and the control socket.
        way: one of WAYS, or `auto`.
        caches: what each `--cache` says, `PATH` or `PATH:SIZE`; by default the one folder `base/cache`.
        environment: of every dmfs process started here.
        pid: of the daemon last started, None before that.
        expects_trouble: the plain unmount may fail, the log may hold tracebacks; otherwise `close` fails the test.
    """

    def __init__(
        self,
        source: Path | str,
        *,
        way: str = "auto",
        caches: Sequence[Path | str] | None = None,
        immutable: bool = True,
        flags: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        base: Path | None = None,
        mountpoint: Path | None = None,
        expects_trouble: bool = False,
        user: str | None = None,
    ) -> None:
        """Root may mount for `user`, whose `base` is then."""
        self._own_base = base is None
        self.base = base or Path(tempfile.mkdtemp(prefix="dm-", dir="/tmp"))
        self.source = Path(source)
        self.view = mountpoint or self.base / "mnt"
        self.view.mkdir(exist_ok=True)
        self.runtime = self.base / "run"
        self.runtime.mkdir(mode=0o700, exist_ok=True)
        self.log_path = self.base / f"{self.view.name}.log"
        self.caches = [str(c) for c in caches] if caches is not None else [str(self.base / "cache")]
        self.immutable = immutable
        self.expects_trouble = expects_trouble
        self.pid: int | None = None
        self._pidfds: dict[int, int] = {}
        self._spawned: list[subprocess.Popen[str]] = []
        front_end = ["--front-end", "pyfuse3"] if way == "pyfuse3" else ["--io", way]
        self._flags = [*front_end, *flags]
        self.environment = clean_environment(self.runtime) | dict(env or {})
        self.sockets = self.runtime / "dmfs"
        if user is not None:
            account = pwd.getpwnam(user)
            os.chown(self.base, account.pw_uid, account.pw_gid)
            usual = Path(f"/run/user/{account.pw_uid}")
            self.sockets = usual / "dmfs" if usual.is_dir() else Path(f"/tmp/dmfs-{account.pw_uid}")
            self._flags += ["--user", user]
        live_mounts.append(self)

    def __repr__(self) -> str:
        return f"<DmfsMount {self.source} on {self.view}, pid {self.pid}>"

    def mount_arguments(self) -> list[str]:
        """The arguments of `dmfs` that mount this."""
        cache_flags = [word for cache in self.caches for word in ("--cache", cache)]
        immutable = ["--immutable"] if self.immutable else []
        log = ["--log-file", str(self.log_path)]
        return ["mount", str(self.source), str(self.view), *cache_flags, *immutable, *log, *self._flags]

    def command_line(self, *arguments: str) -> list[str]:
        """How `dmfs ARGUMENTS` is started here."""
        return dmfs_command(*arguments)

    def command(self, *arguments: str, timeout: float = COMMAND_TIMEOUT) -> subprocess.CompletedProcess[str]:
        """Run `dmfs ARGUMENTS` to its end, whatever its exit code."""
        try:
            return subprocess.run(
                self.command_line(*arguments),
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=timeout,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired as exc:
            raise AssertionError(f"dmfs {' '.join(arguments)} did not end in {timeout:g} s\n{self.log_tail()}") from exc

    def spawn(self, *arguments: str) -> subprocess.Popen[str]:
        """Start `dmfs ARGUMENTS`; the caller waits for it, `close` ends it if need be."""
        process = subprocess.Popen(
            self.command_line(*arguments),
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._spawned.append(process)
        return process

    def start(self) -> "DmfsMount":
        """Mount, expecting success."""
        done = self.command(*self.mount_arguments())
        assert done.returncode == 0, f"mount failed ({done.returncode}): {done.stderr}{done.stdout}\n{self.log_tail()}"
        self.note_daemon()
        return self

    def note_daemon(self) -> int:
        """Ask the daemon who it is, so that `kill` and `close` find it; its pid."""
        self.pid = int(self.status()["pid"])
        if self.pid not in self._pidfds and (pidfd := open_pidfd(self.pid)) is not None:
            self._pidfds[self.pid] = pidfd
        return self.pid

    def umount(self, *flags: str) -> None:
        """Unmount, expecting success, the daemon gone and the mountpoint a plain folder again."""
        done = self.command("umount", str(self.view), *flags)
        assert done.returncode == 0, f"umount failed ({done.returncode}): {done.stderr}{done.stdout}\n{self.log_tail()}"
        assert not is_mounted(self.view), "umount returned 0 but the mount is still there"
        assert not self.is_alive(), f"umount returned 0 but the daemon {self.pid} still runs\n{self.log_tail()}"

    def remount(self) -> "DmfsMount":
        """Unmount and mount again with the same caches."""
        self.umount()
        return self.start()

    def kill(self) -> None:
        """SIGKILL the daemon and wait for its end. The dead mount stays, as it would in the field."""
        assert self.pid is not None, "nothing was mounted"
        self.send_signal(signal.SIGKILL)
        assert ended_within(self._pidfds[self.pid], 10), f"daemon {self.pid} survived SIGKILL for 10 s"

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the daemon; never to another process that got its number."""
        assert self.pid is not None, "nothing was mounted"
        signal.pidfd_send_signal(self._pidfds[self.pid], number)

    def abort(self) -> None:
        """End the mount so that whatever hangs in it fails; may be called from another thread than the test's."""
        with contextlib.suppress(AssertionError):
            self.command("umount", str(self.view), "--force")
        for pidfd in self._pidfds.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)

    def is_alive(self) -> bool:
        """Whether a daemon started here still runs."""
        return any(not ended_within(pidfd, 0) for pidfd in self._pidfds.values())

    def request(self, message: Mapping[str, object], timeout: float = 5.0) -> dict[str, Any]:
        """One exchange over the control socket: a JSON line there, a JSON line back."""
        name = blake2b(os.fsencode(self.view), digest_size=8).hexdigest() + ".sock"
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(timeout)
            sock.connect(str(self.sockets / name))
            sock.sendall(json.dumps(message).encode() + b"\n")
            answer = b""
            while chunk := sock.recv(65536):
                answer += chunk
        return dict(json.loads(answer))

    def status(self) -> dict[str, Any]:
        """The status object, straight from the control socket (a `dmfs status` takes a Python start)."""
        return self.request({"op": "status"})

    def log(self) -> str:
        """The log so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def log_tail(self) -> str:
        """The end of the log, for failure messages."""
        return f"--- log of {self.view} ---\n{self.log()[-LOG_TAIL:]}"

    def copies(self) -> list[str]:
        """Names of the published copies in all folders of all caches, whatever daemon made them."""
        folders = [Path(c.rpartition(":")[0] if ":" in c else c) for c in self.caches]
        names = [p.name for folder in folders for p in folder.glob("*/objects/*") if p.suffix != ".sums"]
        return sorted(names)

    def leftovers(self) -> list[str]:
        """Names of the unpublished files in all folders of all caches."""
        folders = [Path(c.rpartition(":")[0] if ":" in c else c) for c in self.caches]
        return sorted(p.name for folder in folders for p in folder.glob("*/tmp/*"))

    def wait_fills_done(self, timeout: float = 20.0) -> dict[str, Any]:
        """Wait until no fill runs or waits; the status then."""

        def settled() -> dict[str, Any] | None:
            status = self.status()
            return None if status["fills"]["active"] or status["fills"]["queued"] else status

        return wait_until(settled, timeout, "all fills have ended")

    def close(self) -> None:
        """Unmount by all means and remove the folder.

        Raises:
            AssertionError: plain `dmfs umount` was not enough, or the log has a traceback, and none was expected.
        """
        live_mounts.remove(self)
        problem = self._take_down()
        if "Traceback" in self.log():
            problem = (problem or "") + " the log has a traceback."
        tail = self.log_tail()
        for process in self._spawned:
            process.kill()
            process.communicate()
        for pidfd in self._pidfds.values():
            os.close(pidfd)
        self._pidfds.clear()
        if self._own_base and not is_mounted(self.view):
            shutil.rmtree(self.base, ignore_errors=True)
        assert not problem or self.expects_trouble, f"{problem}\n{tail}"

    def _take_down(self) -> str | None:
        if not is_mounted(self.view) and not self.is_alive():
            return None
        problem = None
        for flags in ([], ["--force"]):
            try:
                self.umount(*flags)
                return problem
            except AssertionError as exc:
                problem = problem or f"clean-up by plain umount failed: {exc}"
        for pidfd in self._pidfds.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        detach = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-uz"]
        while is_mounted(self.view) and subprocess.run([*detach, self.view], capture_output=True).returncode == 0:
            pass  # one turn for each mount in the stack
        return problem


def dmfs_command(*arguments: str) -> list[str]:
    """The command line of `dmfs ARGUMENTS` under this Python."""
    return [sys.executable, "-m", "dmfs", *arguments]


def clean_environment(runtime: Path) -> dict[str, str]:
    """An environment in which only the test's own settings reach dmfs, and `dmfs` and `tests` can be imported."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("DMFS_", "SLURM_"))}
    paths = [str(REPOSITORY), *filter(None, [env.get("PYTHONPATH")])]
    own = {"XDG_RUNTIME_DIR": str(runtime), "PYTHONPATH": os.pathsep.join(paths)}
    return env | own | {"DMFS_MIN_FREE": "1MiB"}  # a disk that is nearly full must not fail the tests


class MountFactory:
    """Makes mounts with the arguments of `DmfsMount` and closes them all, newest first."""

    def __init__(self) -> None:
        self._made: list[DmfsMount] = []

    def prepare(self, source: Path | str, *, kind: type[DmfsMount] = DmfsMount, **options: Any) -> DmfsMount:
        """A mount that is not mounted yet (`DmfsMount.start` does it)."""
        if reason := why_no_mounts():
            pytest.skip(reason)
        mount = kind(source, **options)
        self._made.append(mount)
        return mount

    def __call__(self, source: Path | str, **options: Any) -> DmfsMount:
        """A working mount."""
        return self.prepare(source, **options).start()

    def close(self) -> None:
        """Close all mounts; the first failure is raised once all have been tried."""
        failures = []
        while self._made:
            try:
                self._made.pop().close()
            except AssertionError as exc:
                failures.append(exc)
        if failures:
            raise failures[0]
