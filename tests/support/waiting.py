"""Waiting for a condition, with a limit and a telling failure: what stands in place of a sleep in every test."""

import os
import select
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

POLL_INTERVAL = 0.01  # seconds between two looks at a condition


def wait_until(condition: Callable[[], T], timeout: float, what: str) -> T:
    """Call `condition` every 10 ms until it returns something true, and return that.

    Raises:
        AssertionError: `timeout` seconds passed; it says `what` was waited for and the last value seen.
    """
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout:g} s in vain until {what}; last value: {value!r}"
        time.sleep(POLL_INTERVAL)
    return value


def ended_within(pidfd: int, timeout: float) -> bool:
    """Whether the process behind a pidfd ends within `timeout` seconds. It need not be a child."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(timeout * 1000))


def is_running(pid: int) -> bool:
    """Whether a process of this number runs, zombies not counted."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def open_pidfd(pid: int) -> int | None:
    """A pidfd of `pid`, or None if there is no such process. The caller closes it."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None
