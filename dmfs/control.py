"""The daemon's end of the control socket: `dmfs status` and `dmfs umount --force` ask here, never through the mount.

One JSON object and a newline from the client, one from the server, then the connection ends. Requests are
{"op": "status"} and {"op": "stop", "force": bool}; anything else is answered {"error": sentence}. Nothing a client does
can hold up the daemon: clients, their requests and their time are bounded. The client is cli/client.py.
"""

import errno
import json
import logging
import os
import socket
import struct
from collections.abc import Callable
from typing import Any

import trio

from dmfs.runtime import socket_address

logger = logging.getLogger("dmfs")

MAX_CLIENTS = 16  # at the same time; people and a monitor or two ask, more is a loop gone wild
MAX_REQUEST = 64 * 1024  # bytes; a request has tens
CLIENT_TIMEOUT = 5.0  # seconds for all of one client
_RETRY = 0.1  # seconds before the next accept where the process has no descriptor left
_UCRED = struct.Struct("3i")  # struct ucred: pid, uid, gid

Status = Callable[[], dict[str, Any]]
Stop = Callable[[bool], None]


async def serve(
    path: str,
    *,
    status: Status,
    stop: Stop,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Listen on the Unix socket `path`, which must not exist, until cancelled. The file stays, it goes with the lock.

    Args:
        status: gives what {"op": "status"} is answered, in plain JSON types, at once.
        stop: told whether by force; called after its client has been answered.
    """
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
                nursery.start_soon(_serve_client, client, clients, status, stop)


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


async def _serve_client(client: trio.socket.SocketType, clients: trio.Semaphore, status: Status, stop: Stop) -> None:
    stream = trio.SocketStream(client)
    force: bool | None = None
    try:
        with trio.move_on_after(CLIENT_TIMEOUT):
            try:
                request = await _receive(stream)
                if request is None:
                    return
                answer, force = _answer(request, _peer_uid(client), status)
                await stream.send_all(answer + b"\n")
            except trio.BrokenResourceError:
                pass  # the client did not wait; a stop is meant all the same
        if force is not None:
            stop(force)
    finally:
        client.close()
        clients.release()


async def _receive(stream: trio.SocketStream) -> bytes | None:
    """The line a client sent, without the newline; longer than `MAX_REQUEST` if it is too long; None if it left."""
    line = bytearray()
    while b"\n" not in line and len(line) <= MAX_REQUEST:
        part = await stream.receive_some(MAX_REQUEST)
        if not part:
            return None
        line += part
    end = line.find(b"\n")
    return bytes(line[:end] if end >= 0 else line)


def _peer_uid(client: trio.socket.SocketType) -> int:
    uid: int = _UCRED.unpack(client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[1]
    return uid


def _answer(request: bytes, uid: int, status: Status) -> tuple[bytes, bool | None]:
    """The answer, and for a stop whether it is by force."""
    if uid not in (0, os.geteuid()):
        return _error("this daemon belongs to another user"), None
    if len(request) > MAX_REQUEST:
        return _error(f"the request is longer than {MAX_REQUEST} bytes"), None
    try:
        message = json.loads(request)
    except (ValueError, RecursionError):
        return _error("the request is not JSON"), None
    op = message.get("op") if isinstance(message, dict) else None
    if op == "status":
        try:
            return json.dumps(status()).encode(), None
        except Exception:  # whatever it is, the mount lives on
            logger.exception("the status could not be gathered")
            return _error("the status could not be gathered, see the log"), None
    if op == "stop":
        return b'{"ok": true}', bool(message.get("force"))
    return _error(f"unknown request {str(op)[:100]!r}"), None


def _error(sentence: str) -> bytes:
    return json.dumps({"error": sentence}).encode()
