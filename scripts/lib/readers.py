"""Reader processes that read files the way a training job does: open, read to the end, close; several at once.

`ReaderPool` starts them once, so that a measured epoch has no start-up in it: each worker takes a job, says that it is
ready, and all begin together. A worker is this file run as a program, with JSON lines on its standard input and output.
"""

import json
import mmap
import os
import random
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any

import xxhash

REQUEST_SIZE = 1024 * 1024
"""Bytes asked for in one read call, if nothing else is said."""

PAGE_SIZE = 4096
"""Bytes copied at each offset of a mapped file."""

_REPORT_INTERVAL = 0.1  # seconds between two progress lines of a worker


class ReadError(Exception):
    """A reader failed, or did not end in time. The message says at which file."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """What one pass over the files took.

    Attributes:
        seconds: from the start of the first reader to the end of the last.
        cpu_seconds: of all readers, system calls included.
        digests: xxh3 of each file by path, if they were asked for.
    """

    files: int
    bytes: int
    seconds: float
    cpu_seconds: float
    digests: dict[str, int]

    @property
    def files_per_second(self) -> float:
        """Files opened, read and closed per second."""
        return self.files / self.seconds

    @property
    def bytes_per_second(self) -> float:
        """Bytes read per second."""
        return self.bytes / self.seconds


def shuffled(paths: list[str], *, epoch: int) -> list[str]:
    """The paths in the random order of this epoch, the same in every run."""
    order = list(paths)
    random.Random(epoch).shuffle(order)
    return order


class ReaderPool:
    """`count` reader processes; a context manager, which ends them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._workers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "ReaderPool":
        for _ in range(self.count):
            # A session of its own: Ctrl-C is for the parent, which then ends its workers.
            worker = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
            self._workers.append(worker)
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            for pipe in (worker.stdin, worker.stdout):
                assert pipe is not None
                with suppress(BrokenPipeError):
                    pipe.close()
            with suppress(subprocess.TimeoutExpired):  # one that hangs in a system call can't be waited for
                worker.wait(timeout=5)

    def read(
        self,
        root: str | os.PathLike[str],
        paths: list[str],
        *,
        request_size: int = REQUEST_SIZE,
        touch: Sequence[int] = (),
        drop_pages: bool = False,
        digest: bool = False,
        on_progress: Callable[[int, int], object] | None = None,
        timeout: float = 600,
    ) -> Epoch:
        """Read the files `paths` below `root`, dealt out to the workers in turn.

        Args:
            touch: offsets. If there are any, each file is mapped instead of read, and PAGE_SIZE bytes are copied at
                each of them, in this order.
            drop_pages: give each file's pages back to the kernel before closing it (POSIX_FADV_DONTNEED), so that the
                next read of it is served by the file system and not by the page cache.
            on_progress: called with the files and bytes read since the last call, every 0.1 s.
            timeout: seconds for the whole.

        Raises:
            ReadError: a file could not be opened or read, or the time is over. The pool can't be used again.
        """
        deadline = time.monotonic() + timeout
        for index, worker in enumerate(self._workers):
            job = {
                "root": os.fspath(root),
                "paths": paths[index :: self.count],
                "request_size": request_size,
                "touch": list(touch),
                "drop_pages": drop_pages,
                "digest": digest,
                "report": on_progress is not None,
            }
            _send(worker, job)
        ready = 0
        results: list[dict[str, Any]] = []
        for message in self._messages(deadline):
            if "error" in message:
                raise ReadError(message["error"])
            if "ready" in message:
                ready += 1
                if ready == self.count:
                    for worker in self._workers:
                        _send(worker, {"go": True})
            elif "seconds" in message:
                results.append(message)
                if len(results) == self.count:
                    break
            elif on_progress:
                on_progress(message["files"], message["bytes"])
        began = min(result["began"] for result in results)
        return Epoch(
            files=sum(result["files"] for result in results),
            bytes=sum(result["bytes"] for result in results),
            seconds=max(result["began"] + result["seconds"] for result in results) - began,
            cpu_seconds=sum(result["cpu_seconds"] for result in results),
            digests={path: value for result in results for path, value in result["digests"].items()},
        )

    def _messages(self, deadline: float) -> Iterator[dict[str, Any]]:
        """What the workers say, as it comes."""
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(_pipe(worker.stdout), selectors.EVENT_READ, bytearray())
            while True:
                events = selector.select(max(0.0, deadline - time.monotonic()))
                if not events:
                    raise ReadError("the readers did not end in time")
                for key, _ in events:
                    data = os.read(key.fd, 1 << 20)
                    if not data:
                        raise ReadError("a reader process died")
                    key.data.extend(data)
                    *lines, rest = bytes(key.data).split(b"\n")
                    key.data[:] = rest
                    yield from map(json.loads, lines)


def _pipe(pipe: IO[bytes] | None) -> IO[bytes]:
    assert pipe is not None
    return pipe


def _send(worker: subprocess.Popen[bytes], message: dict[str, Any]) -> None:
    stdin = _pipe(worker.stdin)
    stdin.write(json.dumps(message).encode() + b"\n")
    stdin.flush()


def _say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def _work(job: dict[str, Any]) -> dict[str, Any]:
    """One worker's share of an epoch."""
    root = job["root"].encode() + b"/"
    paths: list[str] = job["paths"]
    touch: list[int] = job["touch"]
    drop_pages, digest, report = job["drop_pages"], job["digest"], job["report"]
    buffer = bytearray(job["request_size"])
    view = memoryview(buffer)
    digests: dict[str, int] = {}
    files = size = told_files = told_bytes = 0
    cpu = time.process_time()
    began = told = time.monotonic()
    for path in paths:
        fd = os.open(root + path.encode(), os.O_RDONLY)
        hasher = xxhash.xxh3_64() if digest else None
        if touch:
            size += _touch(fd, touch)
        while not touch:
            got = os.readv(fd, [view])
            size += got
            if hasher:
                hasher.update(view[:got])
            if got < len(view):  # only the end of a regular file makes a read short
                break
        if drop_pages:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
        files += 1
        if hasher:
            digests[path] = hasher.intdigest()
        if report and (now := time.monotonic()) - told > _REPORT_INTERVAL:
            _say({"files": files - told_files, "bytes": size - told_bytes})
            told, told_files, told_bytes = now, files, size
    seconds = time.monotonic() - began
    if report:
        _say({"files": files - told_files, "bytes": size - told_bytes})
    return {
        "began": began,
        "seconds": seconds,
        "cpu_seconds": time.process_time() - cpu,
        "files": files,
        "bytes": size,
        "digests": digests,
    }


def _touch(fd: int, offsets: list[int]) -> int:
    """Map a file and copy a page at each of the offsets; returns the bytes copied."""
    copied = 0
    with mmap.mmap(fd, 0, access=mmap.ACCESS_READ) as mapped:
        for offset in offsets:
            copied += len(mapped[offset : offset + PAGE_SIZE])
    return copied


def _worker_main() -> None:
    for line in sys.stdin:
        job = json.loads(line)
        _say({"ready": True})
        sys.stdin.readline()
        try:
            _say(_work(job))
        except OSError as exc:
            _say({"error": f"a reader failed: {exc}"})


if __name__ == "__main__":
    _worker_main()
