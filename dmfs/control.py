"""The daemon's end of the control socket: `dmfs status`, `umount` and `warm` ask here, never through the mount.

One JSON object and a newline from the client, one from the server, then the connection ends. Requests are
{"op": "status"} and {"op": "stop", "force": bool}; anything else, and what cannot be done, is answered
{"error": sentence, "exit_code": int}.

{"op": "warm", "paths": [text, ...], "push": bool} asks for a batch of files to be made ready. Every 0.2 s a line
{"progress": counts} says that it is under way, until {"ok": true, ...counts} or an error ends it. After an "ok" the
client may ask for the next batch of its run on the same connection. A client that leaves, or speaks before it is
answered, ends its run.

Nothing a client does can hold up the daemon: clients, their requests and their time are bounded. The client is
cli/client.py.
"""

import contextlib
import errno
import json
import os
import socket
import struct
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any, Protocol

import trio

from dmfs.errors import UserError
from dmfs.metrics import WarmProgress
from dmfs.protocol import MAX_BATCH, MAX_REQUEST, PROGRESS_INTERVAL, path_from_text
from dmfs.runtime import socket_address

MAX_CLIENTS = 16  # at the same time; people and a monitor or two ask, more is a loop gone wild
MAX_RUNS = 4  # clients that warm at the same time: the rest of MAX_CLIENTS is for short questions
CLIENT_TIMEOUT = 5.0  # seconds for a client to say what it wants, and to take each line of the answer
_RETRY = 0.1  # seconds before the next accept where the process has no descriptor left
_UCRED = struct.Struct("3i")  # struct ucred: pid, uid, gid

Status = Callable[[], dict[str, Any]]
Stop = Callable[[bool], None]
Surprised = Callable[[str, Exception], None]


class Warm(Protocol):
    """Makes files ready; counts in `progress`, which is read meanwhile. Cancelled when nobody wants it any more."""

    def __call__(self, paths: list[bytes], push: bool, pushed_bytes: int, progress: WarmProgress) -> Awaitable[None]:
        """Make the files at `paths`, relative to the source, ready; see `fuse.warming`.

        Args:
            pushed_bytes: what this run has pushed in earlier batches.

        Raises:
            UserError: for the client: its sentence and exit code. Not within an exception group.
        """


async def serve(
    path: str,
    *,
    status: Status,
    stop: Stop,
    warm: Warm,
    surprised: Surprised,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Listen on the Unix socket `path`, which must not exist, until cancelled. The file stays, it goes with the lock.

    Args:
        status: gives what {"op": "status"} is answered, in plain JSON types, at once.
        stop: told whether by force; called after its client has been answered.
        surprised: told what was being done when a handler failed in a way that nobody expected: logs and counts it.
    """
    server = _Server(status, stop, warm, surprised)
    with trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        with socket_address(path) as address:
            await listener.bind(address)
        os.chmod(path, 0o600)
        listener.listen(MAX_CLIENTS)
        clients = trio.Semaphore(MAX_CLIENTS)
        async with trio.open_nursery() as nursery:
            task_status.started()
            while True:
                client = await _accept(listener)
                if client is None:
                    continue
                try:
                    clients.acquire_nowait()
                except trio.WouldBlock:
                    client.close()
                    continue
                nursery.start_soon(_serve_client, server, client, clients)


async def _accept(listener: trio.socket.SocketType) -> trio.socket.SocketType | None:
    """The next client; None if it has gone, or after a pause if there is no descriptor for it."""
    try:
        client, _ = await listener.accept()
    except OSError as exc:
        if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            await trio.sleep(_RETRY)
        elif exc.errno != errno.ECONNABORTED:
            raise
        return None
    return client


async def _serve_client(server: "_Server", client: trio.socket.SocketType, clients: trio.Semaphore) -> None:
    try:
        await server.serve(trio.SocketStream(client), _peer_uid(client))
    finally:
        client.close()
        clients.release()


class _Server:
    """What a client may ask for, and the answers."""

    def __init__(self, status: Status, stop: Stop, warm: Warm, surprised: Surprised) -> None:
        self._status = status
        self._stop = stop
        self._warm = warm
        self._surprised = surprised
        self._runs = trio.Semaphore(MAX_RUNS)

    async def serve(self, stream: trio.SocketStream, uid: int) -> None:
        """Answer one client."""
        line = None
        with trio.move_on_after(CLIENT_TIMEOUT):
            line = await _receive(stream)
        if line is None:
            return
        try:
            if uid not in (0, os.geteuid()):
                raise UserError("this daemon belongs to another user")
            request = _parse(line)
            op = request.get("op")
            if op == "warm":
                await self._serve_run(stream, request)
            elif op == "stop":
                await _send(stream, _line({"ok": True}))  # a client that does not wait means it all the same
                self._stop(bool(request.get("force")))
            elif op == "status":
                await _send(stream, self._gather_status())
            else:
                raise UserError(f"unknown request {str(op)[:100]!r}")
        except UserError as exc:
            await _send(stream, _line({"error": str(exc), "exit_code": exc.exit_code}))

    def _gather_status(self) -> bytes:
        try:
            return _line(self._status())
        except Exception as exc:  # whatever it is, the mount lives on
            self._surprised("gathering the status", exc)
            raise UserError("the status could not be gathered, see the log") from exc

    async def _serve_run(self, stream: trio.SocketStream, request: dict[str, Any]) -> None:
        """All batches of one client's run. Raises UserError for a request that is not in order."""
        try:
            self._runs.acquire_nowait()
        except trio.WouldBlock:
            raise UserError(
                f"{MAX_RUNS} others are warming files of this mount: wait until one of them has ended"
            ) from None
        try:
            pushed_bytes = 0
            while True:
                paths, push = _parse_batch(request)
                progress = WarmProgress()
                answer = await self._serve_batch(stream, paths, push, pushed_bytes, progress)
                if answer is None or not await _send(stream, _line(answer)) or "ok" not in answer:
                    return
                pushed_bytes += progress.pushed_bytes
                # No limit: it walks directories of a source that may be slow. It has its place among MAX_RUNS.
                line = await _receive(stream)
                if line is None:
                    return
                request = _parse(line)
        finally:
            self._runs.release()

    async def _serve_batch(
        self, stream: trio.SocketStream, paths: list[bytes], push: bool, pushed_bytes: int, progress: WarmProgress
    ) -> dict[str, Any] | None:
        """The last line about a batch, which is not sent yet; None if the client is not there any more."""
        answer: dict[str, Any] | None = None
        is_done = trio.Event()

        async def work() -> None:
            nonlocal answer
            try:
                await self._warm(paths, push, pushed_bytes, progress)
                answer = {"ok": True, **asdict(progress)}
            except UserError as exc:
                answer = {"error": str(exc), "exit_code": exc.exit_code}
            except Exception as exc:  # whatever it is, the mount lives on
                self._surprised("warming files", exc)
                answer = {"error": "a fault in dmfs ended this, see the daemon's log", "exit_code": UserError.exit_code}
            is_done.set()

        async def watch() -> None:
            # The end of the stream, or a word out of turn, which would be lost here.
            with contextlib.suppress(trio.BrokenResourceError):
                await stream.receive_some(1)
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(work)
            nursery.start_soon(watch)
            while True:
                with trio.move_on_after(PROGRESS_INTERVAL):
                    await is_done.wait()
                # Not when it is being sent: half a line would be left in the stream.
                if is_done.is_set() or not await _send(stream, _line({"progress": progress.numbers()})):
                    nursery.cancel_scope.cancel()
                    break
        return answer


async def _receive(stream: trio.SocketStream) -> bytes | None:
    """The line a client sent, without the newline; longer than `MAX_REQUEST` if it is too long; None if it left."""
    line = bytearray()
    with contextlib.suppress(trio.BrokenResourceError):
        while b"\n" not in line and len(line) <= MAX_REQUEST:
            part = await stream.receive_some(MAX_REQUEST)
            if not part:
                return None
            line += part
        end = line.find(b"\n")
        return bytes(line[:end] if end >= 0 else line)
    return None


async def _send(stream: trio.SocketStream, line: bytes) -> bool:
    """Send a line of the answer; False if the client has left, or does not take it."""
    with trio.move_on_after(CLIENT_TIMEOUT), contextlib.suppress(trio.BrokenResourceError):
        await stream.send_all(line)
        return True
    return False


def _peer_uid(client: trio.socket.SocketType) -> int:
    uid: int = _UCRED.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[1]
    return uid


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _parse(line: bytes) -> dict[str, Any]:
    """The request in a line. Raises UserError."""
    if len(line) > MAX_REQUEST:
        raise UserError(f"the request is longer than {MAX_REQUEST} bytes")
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError("the request is not JSON") from None
    return message if isinstance(message, dict) else {}


def _parse_batch(request: dict[str, Any]) -> tuple[list[bytes], bool]:
    """The paths of a batch, and whether they are to be pushed. Raises UserError."""
    names = request.get("paths")
    if request.get("op") != "warm" or not isinstance(names, list) or not 0 < len(names) <= MAX_BATCH:
        raise UserError(f"a batch has a list of 1 to {MAX_BATCH} paths")
    return [_parse_path(name) for name in names], bool(request.get("push"))


def _parse_path(name: object) -> bytes:
    with contextlib.suppress(UnicodeEncodeError):
        if isinstance(name, str) and "\0" not in name and not {"", ".", ".."} & set(name.split("/")):
            return path_from_text(name)
    raise UserError(f"this is no path within the source: {str(name)[:100]!r}")
