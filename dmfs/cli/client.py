"""The asking end of the control socket: plain blocking calls, each with a limit, no trio. The server is control.py."""

import contextlib
import json
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from dmfs.errors import DaemonUnresponsive, UserError
from dmfs.metrics import WarmProgress
from dmfs.protocol import MAX_REQUEST, path_to_text
from dmfs.runtime import MountRecord, find, socket_address

_UCRED = struct.Struct("3i")  # struct ucred: pid, uid, gid
_PAUSE = 0.02  # seconds between two attempts where the daemon has more clients than it takes
_PART = 65536  # bytes
_SILENCE = 10.0  # seconds without a word in a run, where it says every 0.2 s how far it is
_MAX_LINE = 16 * MAX_REQUEST  # bytes of an answer within a run, which has a part of the request's paths at most


def ask(record: MountRecord, request: dict[str, Any], *, timeout: float) -> dict[str, Any]:
    """Send a request to the daemon of a mount and return its answer. `timeout` is in seconds, for all of it.

    Raises:
        DaemonUnresponsive: no answer in time; nobody listens (yet, or any more); or it refused.
    """
    deadline = time.monotonic() + timeout
    while True:
        line = b""
        with contextlib.suppress(OSError), _connect(record, deadline) as connection:
            connection.sendall(json.dumps(request).encode() + b"\n")
            line = _receive(connection, deadline)
        if line:
            break
        # It closes without a word when it has too many clients, and its socket may be about to come.
        if time.monotonic() + _PAUSE > deadline:
            raise DaemonUnresponsive(
                f"the daemon of {record.mountpoint} (pid {record.pid}) did not answer within {timeout:g} s"
            )
        time.sleep(_PAUSE)
    try:
        answer = json.loads(line)
    except ValueError:
        answer = {"error": "it said something that is not JSON"}
    if not isinstance(answer, dict) or "error" in answer:
        reason = answer["error"] if isinstance(answer, dict) else "it said something else"
        raise DaemonUnresponsive(f"the daemon of {record.mountpoint} (pid {record.pid}) did not answer: {reason}")
    return answer


def _connect(record: MountRecord, deadline: float) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        with socket_address(record.socket) as address:
            connection.connect(address)
    except BaseException:
        connection.close()
        raise
    return connection


def _receive(connection: socket.socket, deadline: float) -> bytes:
    """What the daemon sends before it closes; nothing if the line has no end."""
    parts = []
    while True:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        part = connection.recv(_PART)
        if not part:
            break
        parts.append(part)
    line = b"".join(parts)
    return line if line.endswith(b"\n") else b""


class WarmRun:
    """One run of `dmfs warm`: a connection on which batch after batch is asked for. Leaving it, in whatever way, has
    the daemon drop what it is doing for it.
    """

    def __init__(self, record: MountRecord) -> None:
        self._daemon = f"the daemon of {record.mountpoint} (pid {record.pid})"
        self._buffer = bytearray()
        with self._translated():
            self._connection = _connect(record, time.monotonic() + _SILENCE)
            self._connection.settimeout(_SILENCE)

    def __enter__(self) -> "WarmRun":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._connection.close()

    def warm(self, paths: list[bytes], *, push: bool, on_progress: Callable[[WarmProgress], None]) -> WarmProgress:
        """Have a batch of files made ready, as long as that takes, and return what it came to.

        Args:
            paths: relative to the source; at most `protocol.MAX_BATCH`, and `protocol.MAX_REQUEST` bytes in all.
            on_progress: told every 0.2 s how far it is.

        Raises:
            UserError: the daemon refused, with its sentence and exit code.
            DaemonUnresponsive: it is gone, or silent for 10 s.
        """
        request = {"op": "warm", "paths": [path_to_text(path) for path in paths], "push": push}
        with self._translated():
            self._connection.sendall(json.dumps(request).encode() + b"\n")
        while True:
            with self._translated():
                answer = self._receive()
                progress = _parse_progress(answer if "ok" in answer else answer.get("progress"))
            if progress is None:
                raise _refusal(answer)
            if "ok" in answer:
                return progress
            on_progress(progress)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except TimeoutError:
            raise DaemonUnresponsive(f"{self._daemon} did not answer within {_SILENCE:g} s") from None
        except OSError:
            raise DaemonUnresponsive(f"{self._daemon} has ended, or has too many clients: see dmfs status") from None
        except (ValueError, TypeError, AttributeError):
            raise DaemonUnresponsive(f"{self._daemon} said something that is no answer") from None

    def _receive(self) -> dict[str, Any]:
        while b"\n" not in self._buffer:
            part = self._connection.recv(_PART)
            if not part or len(self._buffer) > _MAX_LINE:
                raise ConnectionResetError
            self._buffer += part
        line, _, rest = self._buffer.partition(b"\n")
        self._buffer = rest
        answer: dict[str, Any] = json.loads(line)
        return answer


def _parse_progress(counts: dict[str, Any] | None) -> WarmProgress | None:
    if counts is None:
        return None
    progress = WarmProgress(failed=[(str(path), str(reason)) for path, reason in counts.get("failed", ())])
    for name in progress.numbers():
        setattr(progress, name, int(counts.get(name, 0)))
    return progress


def _refusal(answer: dict[str, Any]) -> UserError:
    refusal = UserError(str(answer.get("error", "the daemon refused, and did not say why")))
    refusal.exit_code = int(answer.get("exit_code", UserError.exit_code))
    return refusal


def open_daemon(record: MountRecord) -> int | None:
    """A pidfd of the daemon of a mount, None if it has ended. The caller closes it.

    The pid is what the kernel says of the socket's other end; where nobody listens, that of the record, which is good
    as long as the record's lock is held.
    """
    pid = 0
    with contextlib.suppress(OSError), _connect(record, time.monotonic() + 1) as connection:
        pid = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[0]
    try:
        pidfd = os.pidfd_open(pid or record.pid)
    except ProcessLookupError:
        return None
    if find(record.mountpoint) == record:  # still, so the pid has not gone to another process meanwhile
        return pidfd
    os.close(pidfd)
    return None
