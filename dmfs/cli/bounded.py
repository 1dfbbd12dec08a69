"""A call that may hang, such as a stat on a file system that is down, with a limit.

It runs in a forked child: a thread that hangs in the kernel would keep the whole process from ending, even by SIGKILL.
The command line has one thread, so forking is safe.
"""

import errno
import os
import pickle
import select
import signal
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_PART = 65536  # bytes
_MAX_FD = 1024  # what the child closes up to, so that a hanging one keeps nobody's pipe open


def call(seconds: float, function: Callable[..., T], *arguments: object) -> T:
    """The result of `function(*arguments)`, a small thing that can be pickled.

    Raises:
        Exception: what the function raised.
        TimeoutError: it did not return in time; the child is killed, which may take effect only when its call returns.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        _run_child(write, function, arguments)
    os.close(write)
    try:
        answer = _read_all(read, seconds)
    finally:
        os.close(read)
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)  # it closed its pipe, so it is at its end
    if not answer:
        raise OSError(errno.EIO, "the process that looked died")
    is_well, result = pickle.loads(answer)
    if not is_well:
        raise result
    value: T = result
    return value


def _read_all(read: int, seconds: float) -> bytes:
    poll = select.poll()
    poll.register(read, select.POLLIN)
    parts: list[bytes] = []
    while poll.poll(seconds * 1000):
        part = os.read(read, _PART)
        if not part:
            return b"".join(parts)
        parts.append(part)
    raise TimeoutError


def _run_child(write: int, function: Callable[..., Any], arguments: tuple[object, ...]) -> None:
    try:
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):
            os.dup2(null, fd)
        os.closerange(3, write)
        os.closerange(write + 1, _MAX_FD)
        try:
            result = (True, function(*arguments))
        except Exception as exc:
            result = (False, exc)
        os.write(write, pickle.dumps(result))
    finally:
        os._exit(0)
