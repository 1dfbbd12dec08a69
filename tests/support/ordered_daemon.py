"""A dmfs daemon that also takes orders from a test: to give up copies, which nothing in the product does yet, and to
tell what `status` does not.

    python -m tests.support.ordered_daemon OPTIONS DMFS_ARGUMENTS...

It is `dmfs DMFS_ARGUMENTS`, settings and all. OPTIONS is a JSON object: `unopened_for` (of tiers/manager.py) and
`written_after` (of tiers/pagedrop.py) are seconds, `user` is the id of an ordinary user to become first. Where a mount
stays in the foreground, `{"ready": true}` goes out once it answers; then each JSON line `{"do": ..., ...}` on standard
input is answered by a line `{"answer": ...}`. `OrderedMount` is the other side.
"""

import contextlib
import encodings.ascii
import encodings.idna  # noqa: F401 - as with dmfs.cli below
import json
import os
import random
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

import trio

from dmfs import daemon
from dmfs.cli import bounded, checks, client, launch, mount, status, umount  # noqa: F401 - a user may be unable to
from dmfs.cli.main import run
from dmfs.tiers import manager, pagedrop
from tests.support.mounts import COMMAND_TIMEOUT, DmfsMount

ANSWER_TIMEOUT = 10.0  # seconds for one order; none of them waits


class OrderedDaemon(daemon.Daemon):
    """The daemon, with one task more. Every public method below `run` is an order."""

    async def run(self, control_socket: str, on_ready: Callable[[], None]) -> None:
        def ready() -> None:
            on_ready()
            _say({"ready": True})

        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._obey)
            await super().run(control_socket, ready)
            nursery.cancel_scope.cancel()

    async def _obey(self) -> None:
        buffered = b""
        async with trio.lowlevel.FdStream(os.dup(0)) as stdin:
            async for chunk in stdin:
                *lines, buffered = (buffered + chunk).split(b"\n")
                for line in lines:
                    arguments = json.loads(line)
                    _say({"answer": getattr(self, arguments.pop("do"))(**arguments)})

    def evict(self, share: float = 1.0, seed: int = 0) -> dict[str, int]:
        """Give up a random share of the copies, as far as nobody has them open: `{evicted, left}`."""
        evicted = 0
        draw = random.Random(seed)
        for store in self._stores:
            keys = list(store._copies)
            evicted += sum(store.evict(key) for key in draw.sample(keys, round(len(keys) * share)))
        return {"evicted": evicted, "left": sum(len(store._copies) for store in self._stores)}

    def pins(self) -> int:
        """Copies that must stay, of one tier or the other."""
        return sum(len(store._pins) for store in self._stores)

    def fills(self) -> int:
        """Files of which some pieces are here."""
        return len(self._manager._fills)


def _say(message: dict[str, Any]) -> None:
    print(json.dumps(message), flush=True)


def main() -> None:
    options = json.loads(sys.argv[1])
    if "unopened_for" in options:
        manager.UNOPENED_FOR = options["unopened_for"]
    if "written_after" in options:
        pagedrop.WRITTEN_AFTER = options["written_after"]
    if user := options.get("user"):  # not before the imports, which may be out of that user's reach
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    daemon.Daemon = OrderedDaemon  # type: ignore[misc]
    sys.exit(run(sys.argv[2:]))


class OrderedMount(DmfsMount):
    """A mount served by this program.

    Attributes:
        options: see above. Whose a mount is, runs the other commands too.
    """

    def __init__(self, *arguments: Any, options: Mapping[str, float] | None = None, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.options = dict(options or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._buffered = b""

    def start(self) -> "OrderedMount":
        """Mount, expecting success."""
        self._end_process()
        self._buffered = b""
        with (self.base / "stderr").open("ab") as stderr:
            self._process = subprocess.Popen(
                self.command_line(*self.mount_arguments(), "--foreground"),
                env=self.environment,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        assert self._read_line(COMMAND_TIMEOUT) == {"ready": True}
        self.note_daemon()
        return self

    def command_line(self, *arguments: str) -> list[str]:
        """As `dmfs ARGUMENTS`, by way of this program."""
        return [sys.executable, "-m", "tests.support.ordered_daemon", json.dumps(self.options), *arguments]

    def order(self, do: str, **arguments: Any) -> Any:
        """Order something; the answer."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": do, **arguments}).encode() + b"\n")
        return self._read_line(ANSWER_TIMEOUT)["answer"]

    def _read_line(self, timeout: float) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        while b"\n" not in self._buffered:
            ready, _, _ = select.select([self._process.stdout], [], [], timeout)
            chunk = os.read(self._process.stdout.fileno(), 65536) if ready else b""
            assert chunk, f"no answer from the daemon: {(self.base / 'stderr').read_text()}\n{self.log_tail()}"
            self._buffered += chunk
        line, _, self._buffered = self._buffered.partition(b"\n")
        return dict(json.loads(line))

    def _end_process(self) -> None:
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        self._process.wait(10)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        self._process = None

    def close(self) -> None:
        """As `DmfsMount.close`."""
        try:
            super().close()
        finally:
            self._end_process()


if __name__ == "__main__":
    main()
