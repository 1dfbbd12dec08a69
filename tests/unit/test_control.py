"""The control socket, server and client: answers, limits, other users, warming, and clients that misbehave."""

import contextlib
import json
import os
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from dmfs import control, protocol
from dmfs.cli import client
from dmfs.errors import ConfigError, DaemonUnresponsive, UserError
from dmfs.metrics import WarmProgress
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
        self.surprises: list[str] = []
        self.batches: list[tuple[list[bytes], bool, int]] = []
        self.work: Callable[[WarmProgress], Awaitable[None]] = at_once
        self.running = 0
        self.began = trio.Event()
        self.cancelled = trio.Event()

    async def serve(self, *, task_status: trio.TaskStatus[None]) -> None:
        await control.serve(
            self.path,
            status=self.status,
            stop=self.stop,
            warm=self.warm,
            surprised=lambda doing, exc: self.surprises.append(f"{doing}: {exc!r}"),
            task_status=task_status,
        )

    def status(self) -> dict[str, Any]:
        return self.answer()

    def stop(self, force: bool) -> None:
        self.stops.append(force)
        self.stopped.set()

    async def warm(self, paths: list[bytes], push: bool, pushed_bytes: int, progress: WarmProgress) -> None:
        self.batches.append((paths, push, pushed_bytes))
        self.running += 1
        self.began.set()
        try:
            await self.work(progress)
        except trio.Cancelled:
            self.cancelled.set()
            raise
        finally:
            self.running -= 1

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

    async def begin_warm(self, *paths: str) -> trio.SocketStream:
        """A connection on which a batch is under way."""
        stream = await self.connect()
        self.began = trio.Event()
        await stream.send_all(warm_line(*paths))
        with trio.fail_after(5):
            await self.began.wait()
        return stream


async def at_once(progress: WarmProgress) -> None:
    progress.files += 1
    progress.pushed_bytes += 10


async def forever(progress: WarmProgress) -> None:
    await trio.sleep_forever()


def warm_line(*paths: str, push: bool = False) -> bytes:
    return json.dumps({"op": "warm", "paths": paths or ("a",), "push": push}).encode() + b"\n"


async def receive_line(stream: trio.SocketStream) -> Any:
    """The next line of an answer; None if the connection has ended."""
    line = b""
    with trio.fail_after(60), contextlib.suppress(trio.BrokenResourceError):
        while part := await stream.receive_some(1):
            line += part
            if part == b"\n":
                return json.loads(line)
    return None


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    made = Daemon(tmp_path / "socket")
    async with trio.open_nursery() as nursery:
        await nursery.start(made.serve)
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
    assert await daemon.ask(line) == {"error": error, "exit_code": 1}
    assert daemon.stops == []


async def test_status_that_fails_is_counted_and_answered(daemon: Daemon) -> None:
    answers: list[Callable[[], dict[str, Any]]] = [lambda: {}["missing"], lambda: {"not": object()}]
    for answer in answers:
        daemon.answer = answer
        answer = await daemon.ask(b'{"op": "status"}\n')
        assert answer == {"error": "the status could not be gathered, see the log", "exit_code": 1}
    daemon.answer = lambda: {"well": True}
    assert await daemon.ask(b'{"op": "status"}\n') == {"well": True}
    assert [surprise.partition("(")[0] for surprise in daemon.surprises] == [
        "gathering the status: KeyError",
        "gathering the status: TypeError",
    ]


async def test_other_users_are_refused(daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_peer_uid", lambda client: 4242)
    for op in ("status", "stop", "warm"):
        answer = await daemon.ask(json.dumps({"op": op}).encode() + b"\n")
        assert answer == {"error": "this daemon belongs to another user", "exit_code": 1}
    assert daemon.stops == []
    assert daemon.batches == []


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
        await nursery.start(made.serve)
        answer = await trio.to_thread.run_sync(partial(client.ask, made.record, {"op": "status"}, timeout=5))
        nursery.cancel_scope.cancel()
    assert answer == {"state": "mounted"}


async def test_run_of_batches(daemon: Daemon) -> None:
    async with await daemon.connect() as stream:
        for names in (["a", "b/c"], ["\udcff\n ä", "d" * 255]):
            await stream.send_all(warm_line(*names, push=True))
            answer = await receive_line(stream)
            assert answer == {"ok": True, **WarmProgress(files=1, pushed_bytes=10).numbers(), "failed": []}
    assert daemon.batches == [([b"a", b"b/c"], True, 0), ([b"\xff\n \xc3\xa4", b"d" * 255], True, 10)]


async def test_progress_comes_regularly(daemon: Daemon, autojump_clock: trio.testing.MockClock) -> None:
    async def work(progress: WarmProgress) -> None:
        for _ in range(10):
            await trio.sleep(protocol.PROGRESS_INTERVAL + 0.01)
            progress.files += 1
        progress.failures = 1
        progress.failed.append(("x", "Input/output error"))

    daemon.work = work
    async with await daemon.connect() as stream:
        await stream.send_all(warm_line())
        counts = []
        while "progress" in (answer := await receive_line(stream)):
            counts.append(answer["progress"]["files"])
            assert "failed" not in answer["progress"]
    assert len(counts) == 10
    assert counts == sorted(counts)
    assert (answer["files"], answer["failures"], answer["failed"]) == (10, 1, [["x", "Input/output error"]])


async def test_client_that_leaves_cancels_its_batch(daemon: Daemon) -> None:
    daemon.work = forever
    stream = await daemon.begin_warm()
    await stream.aclose()
    with trio.fail_after(0.15):  # at once, not with the next progress
        await daemon.cancelled.wait()


async def test_client_that_speaks_out_of_turn_is_dropped(daemon: Daemon) -> None:
    daemon.work = forever
    async with await daemon.begin_warm() as stream:
        await stream.send_all(warm_line())
        with trio.fail_after(5):
            await daemon.cancelled.wait()
        while (answer := await receive_line(stream)) is not None:
            assert "progress" in answer


async def test_client_that_does_not_take_its_progress_is_dropped(
    daemon: Daemon, autojump_clock: trio.testing.MockClock
) -> None:
    daemon.work = forever
    async with await daemon.begin_warm():
        start = trio.current_time()
        with trio.fail_after(10_000):
            await daemon.cancelled.wait()
        # The socket holds some; after that a line that is not taken is the last.
        assert trio.current_time() - start > control.CLIENT_TIMEOUT
    assert daemon.running == 0


async def test_slow_batch_and_slow_walk_are_not_cut_short(
    daemon: Daemon, autojump_clock: trio.testing.MockClock
) -> None:
    async def work(progress: WarmProgress) -> None:
        await trio.sleep(4 * control.CLIENT_TIMEOUT)
        progress.files = 1

    daemon.work = work
    async with await daemon.connect() as stream:
        for pause in (0, 4 * control.CLIENT_TIMEOUT):
            await trio.sleep(pause)
            await stream.send_all(warm_line())
            while "progress" in (answer := await receive_line(stream)):
                pass
            assert answer["files"] == 1


async def test_status_is_answered_while_many_warm(daemon: Daemon) -> None:
    daemon.work = forever
    runs = [await daemon.begin_warm() for _ in range(control.MAX_RUNS)]
    assert await daemon.ask(warm_line()) == {
        "error": "4 others are warming files of this mount: wait until one of them has ended",
        "exit_code": 1,
    }
    assert await daemon.ask(b'{"op": "status"}\n') == {"state": "mounted"}
    await runs.pop().aclose()
    with trio.fail_after(5):
        await daemon.cancelled.wait()
    runs.append(await daemon.begin_warm())
    for stream in runs:
        await stream.aclose()


@pytest.mark.parametrize(
    ("paths", "error"),
    [
        (None, "a batch has a list of 1 to 256 paths"),
        ([], "a batch has a list of 1 to 256 paths"),
        ("a", "a batch has a list of 1 to 256 paths"),
        (["a"] * 257, "a batch has a list of 1 to 256 paths"),
        ([1], "this is no path within the source: '1'"),
        (["a", ""], "this is no path within the source: ''"),
        (["/a"], "this is no path within the source: '/a'"),
        (["a/"], "this is no path within the source: 'a/'"),
        (["a/../b"], "this is no path within the source: 'a/../b'"),
        (["./a"], "this is no path within the source: './a'"),
        (["a\0"], "this is no path within the source: 'a\\x00'"),
        (["\ud800"], "this is no path within the source: '\\ud800'"),
    ],
    ids=lambda value: str(value)[:12].encode("ascii", "backslashreplace").decode(),
)
async def test_bad_batches(daemon: Daemon, paths: Any, error: str) -> None:
    line = json.dumps({"op": "warm", "paths": paths}).encode() + b"\n"
    assert await daemon.ask(line) == {"error": error, "exit_code": 1}
    async with await daemon.connect() as stream:  # and within a run
        await stream.send_all(warm_line())
        assert (await receive_line(stream))["ok"]
        await stream.send_all(line)
        assert await receive_line(stream) == {"error": error, "exit_code": 1}
        assert await receive_line(stream) is None
    assert daemon.batches == [([b"a"], False, 0)]


async def test_refusals_and_surprises_of_the_handler(daemon: Daemon) -> None:
    errors: list[tuple[Exception, dict[str, Any]]] = [
        (ConfigError("nothing can be pushed here"), {"error": "nothing can be pushed here", "exit_code": 3}),
        (ValueError("oh"), {"error": "a fault in dmfs ended this, see the daemon's log", "exit_code": 1}),
    ]
    for exc, expected in errors:

        async def work(progress: WarmProgress, exc: Exception = exc) -> None:
            raise exc

        daemon.work = work
        async with await daemon.connect() as stream:
            await stream.send_all(warm_line())
            assert await receive_line(stream) == expected
            assert await receive_line(stream) is None
    assert daemon.surprises == ["warming files: ValueError('oh')"]
    assert await daemon.ask(b'{"op": "status"}\n') == {"state": "mounted"}


@pytest.mark.slow
async def test_client_warms(daemon: Daemon) -> None:
    async def work(progress: WarmProgress) -> None:
        progress.files = len(daemon.batches)
        await trio.sleep(2.5 * protocol.PROGRESS_INTERVAL)
        progress.failed.append(("\udcff", "no"))

    def run() -> tuple[list[WarmProgress], list[WarmProgress]]:
        seen: list[WarmProgress] = []
        with client.WarmRun(daemon.record) as run:
            return [run.warm([name], push=True, on_progress=seen.append) for name in (b"\xff", b"b")], seen

    daemon.work = work
    answers, seen = await trio.to_thread.run_sync(run)
    assert answers == [
        WarmProgress(files=1, failed=[("\udcff", "no")]),
        WarmProgress(files=2, failed=[("\udcff", "no")]),
    ]
    assert {progress.files for progress in seen} == {1, 2}
    assert daemon.batches == [([b"\xff"], True, 0), ([b"b"], True, 0)]


async def test_client_shows_what_the_daemon_says(daemon: Daemon) -> None:
    async def work(progress: WarmProgress) -> None:
        raise ConfigError("mount with --io pagecache")

    def run() -> None:
        with (
            client.WarmRun(daemon.record) as run,
            pytest.raises(UserError, match=r"^mount with --io pagecache$") as got,
        ):
            run.warm([b"a"], push=True, on_progress=lambda progress: None)
        assert got.value.exit_code == 3

    daemon.work = work
    await trio.to_thread.run_sync(run)


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


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (b"rubbish\n", "said something that is no answer"),
        (b"[]\n", "said something that is no answer"),
        (b'{"ok": true, "files": "x"}\n', "said something that is no answer"),
        (b'{"ok": true, "failed": [1]}\n', "said something that is no answer"),
        (b'{"progress": 1}\n', "said something that is no answer"),
        (b"x" * 2_000_000, "has ended, or has too many clients"),
        (b'{"half', "has ended, or has too many clients"),
        (b"", "has ended, or has too many clients"),
        (None, "did not answer within 0.1 s"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_client_refuses_bad_answers_to_a_batch(
    listener: socket.socket, answer: bytes | None, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_SILENCE", 0.1 if answer is None else 5.0)
    ended = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(ConnectionError):
            connection.recv(1000)
            connection.sendall(answer or b"")
            if answer is None:
                ended.wait(5)

    thread = threading.Thread(target=serve)
    thread.start()
    with client.WarmRun(record_of(listener)) as run, pytest.raises(DaemonUnresponsive, match=sentence):
        run.warm([b"a"], push=False, on_progress=lambda progress: None)
    ended.set()
    thread.join(timeout=5)


def test_client_finds_nobody_to_warm(tmp_path: Path) -> None:
    with pytest.raises(DaemonUnresponsive, match="has ended"):
        client.WarmRun(MountRecord("/mnt/a", "/s", 1, 1.0, str(tmp_path / "missing")))
