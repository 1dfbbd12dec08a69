"""Serves a `FakeOperations` through one front end on a real mount, in a process of its own, by order of a test.

    python -m tests.mount.front_end_runner FRONT_END MOUNTPOINT

One JSON object a line: `{"ready": true}` or `{"error": ...}` goes out first; then each command `{"do": ..., ...}` that
comes in on standard input is answered by `{"answer": ...}`. Once the mount has been unmounted, it tells its last state
by `{"end": ...}` and ends with 0. `Served` is the other side: it starts this program and talks to it, and never touches
the mount itself.
"""

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import trio

from dmfs import errors, log
from dmfs.fuse import mounting
from dmfs.fuse.kernel import KernelSession
from dmfs.fuse.portable import PortableSession
from tests.operations.fake_operations import FakeOperations, Rule
from tests.support.files import content
from tests.support.mounts import REPOSITORY, is_mounted
from tests.support.waiting import wait_until

if TYPE_CHECKING:
    from dmfs.fuse.operations import Operations

FILE_SIZE = 1_000_001  # `file`: more than one READ, and no whole number of pages
LIST_LENGTH = 700  # `many/`: several READDIRs
ANSWER_TIMEOUT = 10.0  # seconds for one command; none of them waits
FSNAME = "fake, a\\b é"


def plant(fake: FakeOperations) -> None:
    """The tree of every test here."""
    fake.add_file(b"file", content(1, 0, FILE_SIZE))
    fake.add_file(b"other", content(2, 0, 5000))
    for number in range(12):
        fake.add_symlink(b"link%d" % number, b"target%d" % number)
    fake.add_directory(b"dir")
    for number in range(3):
        fake.add_file(b"dir/%d" % number, b"%d" % number)
    fake.add_directory(b"many")
    for number in range(LIST_LENGTH):
        fake.add_file(b"many/%05d-%s" % (number, b"x" * (number % 200)), b"")
    for name, nanoseconds in TIMES.items():
        fake.add_file(name.encode(), b"", st_mtime_ns=nanoseconds, st_atime_ns=nanoseconds, st_ctime_ns=nanoseconds)
    fake.add_file(b"odd", b"12345", st_blocks=77, st_blksize=65536, st_rdev=0x1234, st_nlink=3, ino=(1 << 63) + 5)


SURPRISES = {kind.__name__: kind for kind in (RuntimeError, KeyError, AssertionError, ValueError)}
"""Exceptions that no method of `Operations` is meant to raise."""

TIMES = {
    "minus-1ns": -1,
    "minus-1.5s": -1_500_000_000,
    "1969": -86_400 * 10**9 + 1,
    "zero": 0,
    "2038": (1 << 31) * 10**9,
    "2106": ((1 << 32) - 1) * 10**9 + 999_999_999,
    "2242": (1 << 33) * 10**9,
}
"""Nanoseconds since 1970 of the files so named: the times that front ends get wrong."""


class Commands:
    """What a test may order. Every method is one command; strings stand for bytes in UTF-8."""

    def __init__(self, fake: FakeOperations, stop: Callable[[], None]) -> None:
        self._fake = fake
        self.stop = stop

    def rule(
        self,
        method: str,
        exception: str | None = None,
        number: int = 0,
        waits: bool = False,
        subject: str | None = None,
    ) -> None:
        exc: BaseException | None = None
        if exception == "OSError":
            exc = OSError(number, os.strerror(number))
        elif exception == "StaleFile":
            exc = errors.StaleFile("the file changed")
        elif exception:
            exc = SURPRISES[exception]("bug")
        self._fake.rules[method] = Rule(exc, waits, None if subject is None else subject.encode())

    def decline(self, method: str) -> None:
        self._fake.declining.add(method)

    def reset(self) -> None:
        self._fake.reset()

    def let_go(self) -> None:
        self._fake.let_go()

    def ttl(self, seconds: float) -> None:
        self._fake.ttl = seconds

    def add_file(self, path: str, text: str) -> int:
        return self._fake.add_file(path.encode(), text.encode())

    def add_symlink(self, path: str, target: str) -> int:
        return self._fake.add_symlink(path.encode(), target.encode())

    def remove(self, path: str) -> None:
        self._fake.remove(path.encode())

    def state(self) -> dict[str, Any]:
        fake = self._fake
        return {
            "held": [[method, name.decode()] for method, name in fake.held],
            "cancelled": [[method, name.decode()] for method, name in fake.cancelled],
            "references": {fake.nodes[node].name.decode(): count for node, count in fake.references.items() if count},
            "handles": len(fake.handles),
            "directory_handles": len(fake.directory_handles),
            "misuse": fake.misuse,
            "surprises": fake.metrics.surprises,
            "errors": fake.errors.entries(),
            "calls": dict(fake.calls),
        }


async def serve(front_end: str, mountpoint: str) -> None:
    """Mount, say so, obey, and end with the mount."""
    fake = FakeOperations()
    plant(fake)
    async with trio.open_nursery() as obeying:
        async with trio.open_nursery() as serving:
            try:
                session = _session(front_end, mountpoint, fake)
                await serving.start(session.run)
            except errors.UserError as exc:
                _say({"error": str(exc)})
                return
            commands = Commands(fake, getattr(session, "close", serving.cancel_scope.cancel))
            _say({"ready": True})
            obeying.start_soon(_obey, commands)
        obeying.cancel_scope.cancel()
    _say({"end": commands.state()})


def _session(front_end: str, mountpoint: str, fake: FakeOperations) -> PortableSession | KernelSession:
    operations = cast("Operations", fake)
    if front_end == "pyfuse3":
        return PortableSession(operations, mountpoint=mountpoint, fsname=FSNAME, allow_other=False)
    return KernelSession(mounting.mount(mountpoint, fsname=FSNAME, allow_other=False), operations)


async def _obey(commands: Commands) -> None:
    buffered = b""
    async with trio.lowlevel.FdStream(os.dup(0)) as stdin:
        async for chunk in stdin:
            *lines, buffered = (buffered + chunk).split(b"\n")
            for line in lines:
                arguments = json.loads(line)
                _say({"answer": getattr(commands, arguments.pop("do"))(**arguments)})


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def main() -> None:
    log.setup(log_file=None, verbose=False)
    trio.run(serve, sys.argv[1], sys.argv[2])


class Served:
    """A mount served by this program in a child, for a test.

    Attributes:
        view: the mountpoint.
        error: why it could not mount, in one sentence; else None.
        process: the child.
    """

    def __init__(self, front_end: str, *, mountpoint: Path | None = None) -> None:
        self.front_end = front_end
        self._base = Path(tempfile.mkdtemp(prefix="dm-", dir="/tmp"))
        self.view = mountpoint or self._base / "mnt"
        if mountpoint is None:
            self.view.mkdir()
        self.log_path = self._base / "log"
        with self.log_path.open("wb") as log_file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.mount.front_end_runner", front_end, str(self.view)],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log_file,
                cwd=REPOSITORY,
            )
        self._buffered = b""
        self.error = self._read_line().get("error")

    def do(self, command: str, **arguments: Any) -> Any:
        """Order something and return the answer."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": command, **arguments}).encode() + b"\n")
        return self._read_line()["answer"]

    @contextmanager
    def watched(self, seconds: float) -> Iterator[None]:
        """Kill the child if the block takes longer: whoever is stuck in the mount then fails instead of hanging."""
        watchdog = threading.Timer(seconds, self.process.kill)
        watchdog.start()
        try:
            yield
        finally:
            watchdog.cancel()

    def state(self) -> dict[str, Any]:
        """The fake's account of the moment."""
        state: dict[str, Any] = self.do("state")
        return state

    def wait_held(self, method: str, name: str) -> None:
        """Wait until a call of `method` about `name` waits in the fake."""
        wait_until(lambda: [method, name] in self.state()["held"], 10, f"{method} of {name} is held")

    def log(self) -> str:
        """What the child wrote to standard error."""
        return self.log_path.read_text(errors="replace")

    def _read_line(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        while b"\n" not in self._buffered:
            ready, _, _ = select.select([self.process.stdout], [], [], ANSWER_TIMEOUT)
            assert ready, f"no answer from the child\n{self.log()}"
            chunk = os.read(self.process.stdout.fileno(), 65536)
            assert chunk, f"the child ended\n{self.log()}"
            self._buffered += chunk
        line, _, self._buffered = self._buffered.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def unmount(self) -> dict[str, Any]:
        """Unmount as a user does; the fake's last state. The child has to end by that."""
        wait_until(self._try_unmount, 10, f"{self.view} could be unmounted")
        return self.wait_end()

    def wait_end(self) -> dict[str, Any]:
        """Wait until the child has ended, which must be with 0; the fake's last state."""
        state: dict[str, Any] = self._read_line()["end"]
        assert self.process.wait(10) == 0, self.log()
        return state

    def _try_unmount(self) -> bool:
        try:
            mounting.unmount(str(self.view))
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Kill what is left of it."""
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        if is_mounted(self.view):
            mounting.unmount(str(self.view), lazy=True)
        self.log_path.unlink()
        if self.view.parent == self._base:
            self.view.rmdir()
        self._base.rmdir()


if __name__ == "__main__":
    main()
