"""Mounts that the quick start and the benchmarks make: dmfs by its command line, and programs that serve by themselves.

Each is a context manager that always unmounts. Whether something is mounted is read from /proc, never asked of the
mountpoint, which could hang.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

MOUNT_TIMEOUT = 60.0  # seconds for a mount or an unmount; both take well under one when all is well

_CLOCK_TICK = os.sysconf("SC_CLK_TCK")


class MountFailed(Exception):
    """A mount did not come up, did not go, or a command failed. The message has what the program said."""


def is_mounted(path: Path) -> bool:
    """True if `path` (absolute, no links) is a mountpoint."""
    wanted = os.fsencode(path)
    lines = Path("/proc/self/mountinfo").read_bytes().splitlines()
    return any(line.split()[4].decode("unicode_escape").encode("latin-1") == wanted for line in lines)


def cpu_seconds(pid: int) -> float:
    """Processor time a process has used, in user and kernel mode, all threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _CLOCK_TICK


def session_cpu_seconds(pid: int) -> float:
    """The same of all living processes of the session that the process `pid` is in: its helpers count too."""
    session = os.getsid(pid)
    return sum(stat.cpu_seconds for stat in _processes() if stat.session == session)


@dataclass(frozen=True, slots=True)
class _Process:
    session: int
    is_zombie: bool
    cpu_seconds: float


def _processes() -> Iterator[_Process]:
    """All processes there are."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            fields = file.read_text().rpartition(")")[2].split()
            yield _Process(int(fields[3]), fields[0] in "ZX", (int(fields[11]) + int(fields[12])) / _CLOCK_TICK)


def interrupt_once() -> None:
    """Let the first Ctrl-C (or SIGTERM, SIGHUP) raise KeyboardInterrupt; a second one does not cut clean-up short."""

    def interrupt(number: int, frame: object) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        signal.signal(number, interrupt)


def wait_until(condition: Callable[[], bool], what: str, *, timeout: float, interval: float = 0.02) -> None:
    """Wait for a condition. Raises MountFailed if it does not come true within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise MountFailed(f"after {timeout:.0f} s still not: {what}")
        time.sleep(interval)


def detach(mountpoint: Path) -> None:
    """Take a mount away even if it is busy or dead. No error if there is none."""
    while is_mounted(mountpoint):
        command = ["umount", "-l"] if os.geteuid() == 0 else ["fusermount3", "-u", "-z"]
        subprocess.run([*command, str(mountpoint)], check=True, capture_output=True, timeout=MOUNT_TIMEOUT)


class DmfsMount:
    """dmfs over `source`: a context manager around `mount` and `unmount`, which a restart calls by hand.

    Attributes:
        pid: of the daemon, 0 while there is none.
        mount_seconds: what the last `dmfs mount` took, from starting the command to its return.
    """

    def __init__(
        self,
        source: Path,
        mountpoint: Path,
        cache: Path,
        *,
        size: str = "80%",
        front_end: str = "kernel",
        io: str | None = None,
    ) -> None:
        self.source = source
        self.mountpoint = mountpoint
        self.pid = 0
        self.mount_seconds = 0.0
        self._flags = ["--cache", f"{cache}:{size}", "--front-end", front_end, *(["--io", io] if io else [])]

    def __enter__(self) -> "DmfsMount":
        self.mountpoint.mkdir(exist_ok=True)
        try:
            self.mount()
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        if is_mounted(self.mountpoint):
            try:
                self.unmount(force=exc is not None)
            finally:
                detach(self.mountpoint)

    def mount(self) -> None:
        """Run `dmfs mount`. Raises MountFailed."""
        began = time.monotonic()
        _dmfs("mount", str(self.source), str(self.mountpoint), *self._flags)
        self.mount_seconds = time.monotonic() - began
        self.pid = self.status()["pid"]

    def unmount(self, *, force: bool = False) -> None:
        """Run `dmfs umount`, which returns when the daemon is gone. Raises MountFailed."""
        _dmfs("umount", str(self.mountpoint), *(["--force"] if force else []))
        self.pid = 0

    def push(self, folder: str) -> None:
        """Have all files of a folder of the mount pushed into the page cache. Raises MountFailed."""
        counts = json.loads(_dmfs("warm", str(self.mountpoint), str(self.mountpoint / folder), "--push", "--json"))
        if counts["pushed"] < counts["files"]:
            raise MountFailed(f"of {counts['files']:,} files {counts['pushed']:,} were pushed")

    def status(self) -> dict[str, Any]:
        """What `dmfs status --json` says of this mount. Raises MountFailed."""
        status: dict[str, Any] = json.loads(_dmfs("status", str(self.mountpoint), "--json"))
        return status

    def status_text(self) -> str:
        """What `dmfs status` prints of this mount for people. Raises MountFailed."""
        return _dmfs("status", str(self.mountpoint))

    def wait_idle(self, *, copies: int | None = None) -> None:
        """Wait until the tier is scanned and nothing is being copied (and, if given, until there are `copies`)."""

        def is_idle() -> bool:
            status = self.status()
            is_scanned = all(tier["state"] != "scanning" for tier in status["tiers"])
            is_filling = status["fills"]["active"] or status["fills"]["queued"]
            found = sum(tier["copies"] for tier in status["tiers"])
            return is_scanned and not is_filling and (copies is None or found >= copies)

        wait_until(is_idle, f"{self.mountpoint} is idle", timeout=120)


def dmfs_command() -> list[str]:
    """The command line that runs this checkout's dmfs."""
    return [sys.executable, "-m", "dmfs"]


def _dmfs(*arguments: str) -> str:
    """Run a dmfs command with none of the user's settings; returns its output. Raises MountFailed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("DMFS_")}
    return run_command([*dmfs_command(), *arguments], env=env)


def run_command(command: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = MOUNT_TIMEOUT) -> str:
    """Run a command to its end; returns its output. Raises MountFailed with what it said."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,  # Ctrl-C is for the parent: a mount that is cut short half-way is harder to undo
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # it may hang in a mount that only the caller can end
            process.communicate(timeout=1)
        raise MountFailed(f"{' '.join(command[:4])} did not end in {timeout:.0f} s") from None
    except KeyboardInterrupt:
        process.communicate(timeout=timeout)
        raise
    if process.returncode:
        raise MountFailed((err or out).strip() or f"{' '.join(command)} returned {process.returncode}")
    return out


@contextmanager
def served(
    command: Sequence[str], mountpoint: Path, *, log: Path | None = None, env: Mapping[str, str] | None = None
) -> Iterator[int]:
    """A program in the foreground that serves a file system at `mountpoint`; gives its pid.

    It runs in a session of its own, and is gone with all of its helpers at the end. The mountpoint is never touched, as
    the program may hang: that it is mounted does not say that it answers.

    Args:
        log: where the program's output goes, instead of to ours.

    Raises:
        MountFailed: it did not start, ended at once, or is not mounted in time.
    """
    mountpoint.mkdir(exist_ok=True)
    with ExitStack() as stack:
        output = stack.enter_context(log.open("ab")) if log else None
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env, start_new_session=True
        )
        stack.callback(_end, process, mountpoint)
        wait_until(
            lambda: is_mounted(mountpoint) or process.poll() is not None,
            f"{mountpoint} is mounted",
            timeout=MOUNT_TIMEOUT,
        )
        if process.poll() is not None:
            last = (log.read_text(errors="replace").splitlines() or [""])[-1] if log else ""
            raise MountFailed(f"{Path(command[0]).name} ended with {process.returncode}: {last}")
        yield process.pid


def _end(process: subprocess.Popen[bytes], mountpoint: Path) -> None:
    """Unmount, wait for the program and its helpers to end, and kill what is left of them."""
    with suppress(subprocess.SubprocessError):  # where it hangs unmounting can hang too: then once more below
        detach(mountpoint)
    try:
        wait_until(lambda: not _is_alive(process.pid), "the program has ended", timeout=10)
    except MountFailed:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    detach(mountpoint)


def _is_alive(session: int) -> bool:
    """True if a process of the session runs."""
    return any(process.session == session and not process.is_zombie for process in _processes())


@contextmanager
def loopback(source: Path, mountpoint: Path) -> Iterator[int]:
    """The pyfuse3 loop-back file system over `source`; gives the pid of its process. Raises MountFailed."""
    script = Path(__file__).with_name("loopback_pyfuse3.py")
    with served([sys.executable, str(script), str(source), str(mountpoint)], mountpoint) as pid:
        os.stat(mountpoint)  # waits until it serves
        yield pid
