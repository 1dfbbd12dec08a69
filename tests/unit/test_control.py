"""The control socket, server and client: answers, limits, other users, and clients that misbehave."""

import json
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from dmfs import control
from dmfs.cli import client
from dmfs.errors import DaemonUnresponsive
from dmfs.runtime import MountRecord

RECORD = MountRecord("/mnt/a", "/source", os.getpid(), 1.0)


class Daemon:
    """What a daemon gives to `serve`."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self.record = MountRecord("/mnt/a", "/source", os.getpid(), 1.0, self.path)
        self.answer: Callable[[], dict[str, Any]] = lambda: {"state": "mounted"}
        self.stops: list[bool] = []
        self.stopped = trio.Event()

    def status(self) -> dict[str, Any]:
        return self.answer()

    def stop(self, force: bool) -> None:
        self.stops.append(force)
        self.stopped.set()

    async def connect(self) -> trio.SocketStream:
        return trio.SocketStream(await self._socket())

    async def _socket(self) -> trio.socket.SocketType:
        connection = trio.socket.socket(socket.AF_UNIX)
        await connection.connect(self.path)
        return connection

    async def ask(self, line: bytes) -> Any:
        stream = await self.connect()
        async with stream:
            await stream.send_all(line)
            answer = b"".join([part async for part in stream])
        return json.loads(answer) if answer else None


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    made = Daemon(tmp_path / "socket")
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(control.serve, made.path, status=made.status, stop=made.stop))
        yield made
        nursery.cancel_scope.cancel()


async def test_status(daemon: Daemon) -> None:
    daemon.answer = lambda: {"mountpoint": "/mnt/\udcff ä\n", "tiers": [{"used_bytes": 1 << 60}]}
    assert await daemon.ask(b'{"op": "status"}\n') == daemon.answer()
    assert os.stat(daemon.path).st_mode & 0o777 == 0o600


async def test_client_gets_the_same(daemon: Daemon) -> None:
    daemon.answer = lambda: {"state": "mounted", "errors": ["x" * 100] * 10_000}
    request = partial(client.ask, daemon.record, {"op": "status"}, timeout=5)
    assert await trio.to_thread.run_sync(request) == daemon.answer()


@pytest.mark.parametrize("force", [True, False])
async def test_stop(daemon: Daemon, force: bool) -> None:
    assert await daemon.ask(json.dumps({"op": "stop", "force": force}).encode() + b"\n") == {"ok": True}
    with trio.fail_after(5):
        await daemon.stopped.wait()
    assert daemon.stops == [force]


async def test_stop_is_done_for_a_client_that_does_not_wait(daemon: Daemon) -> None:
    stream = await daemon.connect()
    await stream.send_all(b'{"op": "stop"}\n')
    await stream.aclose()
    with trio.fail_after(5):
        await daemon.stopped.wait()
    assert daemon.stops == [False]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"rubbish\n", "the request is not JSON"),
        (b"\xff\n", "the request is not JSON"),
        (b"[" * 50_000 + b"\n", "the request is not JSON"),
        (b"[]\n", "unknown request 'None'"),
        (b"{}\n", "unknown request 'None'"),
        (b'{"op": "format"}\n', "unknown request 'format'"),
        (b'{"op": ["status"]}\n', "unknown request \"['status']\""),
        (b"x" * (control.MAX_REQUEST + 1), "the request is longer than 65536 bytes"),
    ],
    ids=lambda value: str(value[:12]),
)
async def test_bad_requests(daemon: Daemon, line: bytes, error: str) -> None:
    assert await daemon.ask(line) == {"error": error}
    assert daemon.stops == []


async def test_status_that_fails_is_logged_and_answered(daemon: Daemon, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "dmfs")
    answers: list[Callable[[], dict[str, Any]]] = [lambda: {}["missing"], lambda: {"not": object()}]
    for answer in answers:
        daemon.answer = answer
        assert await daemon.ask(b'{"op": "status"}\n') == {"error": "the status could not be gathered, see the log"}
    daemon.answer = lambda: {"well": True}
    assert await daemon.ask(b'{"op": "status"}\n') == {"well": True}


async def test_other_users_are_refused(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_peer_uid", lambda client: 4242)
    for op in ("status", "stop"):
        answer = await daemon.ask(json.dumps({"op": op}).encode() + b"\n")
        assert answer == {"error": "this daemon belongs to another user"}
    assert daemon.stops == []


async def test_peer_uid_is_the_kernels() -> None:
    left, right = trio.socket.socketpair()
    with left, right:
        assert control._peer_uid(left) == os.geteuid()


async def test_silent_clients_are_few_and_short_lived(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    silent = [await daemon.connect() for _ in range(control.MAX_CLIENTS)]
    await trio.testing.wait_all_tasks_blocked()
    assert await daemon.ask(b"") is None  # one more is sent away
    start = trio.current_time()
    for stream in silent:
        assert await stream.receive_some(1) == b""
    assert trio.current_time() - start <= control.CLIENT_TIMEOUT
    assert await daemon.ask(b'{"op": "status"}\n') == {"state": "mounted"}
    for stream in silent:
        await stream.aclose()


async def test_client_that_does_not_read_is_left(daemon: Daemon, autojump_clock: trio.testing.MockClock) -> None:
    daemon.answer = lambda: {"much": "x" * 10_000_000}
    async with await daemon.connect() as stream:
        await stream.send_all(b'{"op": "status"}\n')
        await trio.sleep(control.CLIENT_TIMEOUT + 1)
        with trio.fail_after(5):
            received = b"".join([part async for part in stream])
    assert not received.endswith(b"\n")


async def test_long_path(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 120)
    folder.mkdir()
    made = Daemon(folder / "socket")
    async with trio.open_nursery() as nursery:
        await nursery.start(partial(control.serve, made.path, status=made.status, stop=made.stop))
        answer = await trio.to_thread.run_sync(partial(client.ask, made.record, {"op": "status"}, timeout=5))
        nursery.cancel_scope.cancel()
    assert answer == {"state": "mounted"}


@pytest.fixture
def listener(tmp_path: Path) -> Any:
    """A daemon that is stopped: the kernel takes the connection, nobody answers."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(tmp_path / "socket"))
        made.listen(1)
        yield made


def record_of(listener: socket.socket) -> MountRecord:
    return MountRecord("/mnt/a", "/source", os.getpid(), 1.0, listener.getsockname())


@pytest.mark.parametrize("waiting", [0, 4])
def test_client_gives_up_on_a_silent_daemon(listener: socket.socket, waiting: int) -> None:
    """With nobody and with so many before it that the kernel takes no more."""
    others = [socket.socket(socket.AF_UNIX) for _ in range(waiting)]
    for other in others:
        other.setblocking(False)
        other.connect_ex(listener.getsockname())
    with pytest.raises(DaemonUnresponsive, match=rf"of /mnt/a \(pid {os.getpid()}\) did not answer within 0.1 s"):
        client.ask(record_of(listener), {"op": "status"}, timeout=0.1)
    for other in others:
        other.close()


def test_client_gives_up_where_nobody_listens(tmp_path: Path) -> None:
    for name in ("missing", "file"):
        (tmp_path / "file").touch()
        with pytest.raises(DaemonUnresponsive, match="did not answer within"):
            client.ask(MountRecord("/mnt/a", "/s", 1, 1.0, str(tmp_path / name)), {"op": "status"}, timeout=0.05)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (b"rubbish\n", "said something that is not JSON"),
        (b"[]\n", "said something else"),
        (b'{"error": "no"}\n', "did not answer: no"),
        (b'{"half', "did not answer within"),
        (b"", "did not answer within"),
    ],
)
def test_client_refuses_bad_answers(listener: socket.socket, answer: bytes, sentence: str) -> None:
    def serve() -> None:
        while True:
            connection, _ = listener.accept()
            with connection:
                if not connection.recv(1000):
                    return
                connection.sendall(answer)

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(DaemonUnresponsive, match=sentence):
        client.ask(record_of(listener), {"op": "status"}, timeout=0.1)
    with socket.socket(socket.AF_UNIX) as last:
        last.connect(listener.getsockname())
    thread.join(timeout=5)


def test_client_waits_for_a_daemon_that_is_about_to_listen(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as late:
        late.bind(path)

        def serve() -> None:
            late.listen(1)
            connection, _ = late.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b'{"ok": true}\n')

        timer = threading.Timer(0.1, serve)
        timer.start()
        assert client.ask(MountRecord("/mnt/a", "/s", 1, 1.0, path), {"op": "stop"}, timeout=5) == {"ok": True}
        timer.join(timeout=5)
