"""Starting and asking slowfs from Python: for tests, benchmarks and the quick start.

with SlowFs(source, mountpoint, latency=0.001, bandwidth=200_000_000) as slow:
    ...
    print(slow.counters().bytes)
"""

import contextlib
import json
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from dmfs.fuse import mounting
from scripts.lib.slowfs_server import Counters

TIMEOUT = 30.0  # seconds for each step; all take well under one when all is well
ROOT = Path(__file__).resolve().parents[2]

Self = TypeVar("Self", bound="SlowFs")


class SlowFsError(Exception):
    """slowfs did not start, did not answer, or refused a request. The message has what it said."""


class SlowFs:
    """A slowfs of one's own: mounted by `start` or the `with` block, which also makes the mountpoint.

    Attributes:
        pid: of its process, 0 before the start.
    """

    module = "scripts.slowfs"

    def __init__(
        self,
        source: Path,
        mountpoint: Path,
        *,
        latency: float = 0.0,
        bandwidth: float = 0.0,
        age: float = 0.0,
        attr_timeout: float = 1.0,
    ) -> None:
        """
        Args:
            latency: seconds per operation.
            bandwidth: bytes per second of all reads together, 0 for no limit.
            age: seconds that files look older.
            attr_timeout: seconds that the kernel may remember names and attributes.
        """
        self.source = source
        self.mountpoint = mountpoint
        self.pid = 0
        self._options = {
            "--latency": latency * 1e3,
            "--bandwidth": bandwidth / 1e6,
            "--age": age,
            "--attr-timeout": attr_timeout,
        }
        self._process: subprocess.Popen[str] | None = None
        self._folder = ""

    def __enter__(self: Self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def start(self) -> None:
        """Mount; returns when the mount answers. Raises SlowFsError."""
        self.mountpoint.mkdir(exist_ok=True)
        self._folder = tempfile.mkdtemp(prefix="slowfs-", dir="/tmp")  # the path of a Unix socket must be short
        options = [word for name, value in self._options.items() for word in (name, str(value))]
        said = Path(self._folder) / "stderr"  # not ours: whoever reads that would wait for slowfs too
        with said.open("wb") as stderr:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", self.module, "--foreground", "--control", f"{self._folder}/control"),
                    *options,
                    *(str(self.source.absolute()), str(self.mountpoint.absolute())),
                ],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,  # Ctrl-C is for the caller, who may still have to unmount what lies above
            )
        assert self._process.stdout is not None
        self.pid = self._process.pid
        if not self._process.stdout.readline():
            code = self._process.wait(TIMEOUT)
            words = said.read_text(errors="replace").strip()
            self.stop()
            raise SlowFsError(f"slowfs over {self.source} ended with {code} before the mount answered: {words}")

    def stop(self) -> None:
        """Unmount, busy or not, and wait until the process is gone. No error if it is already."""
        if self._process is None:
            return
        process, self._process = self._process, None
        with process:
            process.terminate()
            try:
                process.wait(TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
        found = mounting.find_mount(str(self.mountpoint))
        if found is not None and found.fs_type == "fuse.slowfs":  # it was killed
            mounting.unmount(found.mountpoint, lazy=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """SIGKILL the process and wait for its end. The dead mount stays until `stop`."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(TIMEOUT)

    def poll(self) -> int | None:
        """The exit code of its process; None while it runs."""
        return self._process.poll() if self._process else 0

    def counters(self) -> Counters:
        """What has been asked of it since the start or the last `reset`."""
        return Counters(**self.request(op="stats"))

    def set(self, *, latency: float | None = None, bandwidth: float | None = None) -> None:
        """Change the limits: seconds per operation, bytes per second. What is under way keeps the old ones."""
        request = {} if latency is None else {"latency_ms": latency * 1e3}
        if bandwidth is not None:
            request["bandwidth"] = bandwidth / 1e6
        self.request(op="set", **request)

    def reset(self) -> None:
        """All counters to 0."""
        self.request(op="reset")

    def request(self, **request: Any) -> dict[str, Any]:
        """One exchange over the control socket. Raises SlowFsError."""
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as connection:
            connection.settimeout(TIMEOUT)
            connection.connect(f"{self._folder}/control")
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as file:
                line = file.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": "no answer"}
        if "error" in answer:
            raise SlowFsError(f"{request}: {answer['error']}")
        return answer
