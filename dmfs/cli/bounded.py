"""Calls that may hang, such as a stat on a file system that is down, with a limit.

They run in a forked child: a thread that hangs in the kernel would keep the whole process from ending, even by SIGKILL.
The command line has one thread, so forking is safe.
"""

import errno
import os
import pickle
import select
import signal
import struct
import time
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")

_LENGTH = struct.Struct("=I")  # bytes of the message that follows
_PART = 65536  # bytes
_DYING = 0.1  # seconds a killed child is waited for
_MAX_FD = 1024  # what the child closes up to, so that a hanging one keeps nobody's pipe open


def call(seconds: float, function: Callable[..., T], *arguments: object) -> T:
    """The result of `function(*arguments)`, a small thing that can be pickled.

    Raises:
        Exception: what the function raised.
        TimeoutError: it did not return in time; the child is killed, which may take effect only when its call returns.
    """
    with Stream(_once, function, arguments) as stream:
        result: T = stream.take(seconds)
        return result


def _once(function: Callable[..., T], arguments: tuple[object, ...]) -> Iterator[T]:
    yield function(*arguments)


class Stream(Generic[T]):
    """What a function yields, small things that can be pickled, as they come. A context manager that kills the child.

    The child works ahead of `take` by what a pipe holds (64 KiB), no further.
    """

    def __init__(self, function: Callable[..., Iterable[T]], *arguments: object) -> None:
        self._buffer = bytearray()
        self._end: Exception | None = None  # what the last message says
        self._read, write = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _run_child(write, function, arguments)
        os.close(write)

    def __enter__(self) -> "Stream[T]":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.kill(self._pid, signal.SIGKILL)
        try:
            deadline = time.monotonic() + _DYING
            while self._fetch(deadline):
                pass
            os.waitpid(self._pid, 0)
        except TimeoutError:
            pass  # it hangs in a call, and is left to init
        finally:
            os.close(self._read)

    def take(self, seconds: float) -> T:
        """The next one.

        Raises:
            Exception: what the function raised.
            EOFError: there are no more.
            OSError: the child died.
            TimeoutError: none came in time; it may be asked for again.
        """
        if self._end is None:
            message = self._receive(time.monotonic() + seconds)
            if message is not None:
                is_well, result = pickle.loads(message)
                if is_well:
                    value: T = result
                    return value
                self._end = result
            else:
                self._end = OSError(errno.EIO, "the process that looked died")
        raise self._end

    def _receive(self, deadline: float) -> bytes | None:
        """A message; None if the child ended before it had said that it would."""
        while True:
            if len(self._buffer) >= _LENGTH.size:
                end = _LENGTH.size + _LENGTH.unpack_from(self._buffer)[0]
                if len(self._buffer) >= end:
                    message = bytes(self._buffer[_LENGTH.size : end])
                    del self._buffer[:end]
                    return message
            if not self._fetch(deadline):
                return None

    def _fetch(self, deadline: float) -> bool:
        """Read on; False at the end, which is the child's too. Raises TimeoutError."""
        poll = select.poll()
        poll.register(self._read, select.POLLIN)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError
        part = os.read(self._read, _PART)
        self._buffer += part
        return bool(part)


def _run_child(write: int, function: Callable[..., Iterable[object]], arguments: tuple[object, ...]) -> None:
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.closerange(3, write)
        os.closerange(write + 1, _MAX_FD)
        try:
            for result in function(*arguments):
                _say(write, (True, result))
            _say(write, (False, EOFError()))
        except Exception as exc:
            _say(write, (False, exc))
    finally:
        os._exit(0)


def _say(pipe: int, message: tuple[bool, object]) -> None:
    content = pickle.dumps(message)
    left = memoryview(_LENGTH.pack(len(content)) + content)
    while left:
        left = left[os.write(pipe, left) :]
