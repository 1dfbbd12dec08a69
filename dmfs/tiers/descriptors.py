"""Open file descriptors that are shared: reference-counted, kept in a bounded LRU.

A thread may still read from a descriptor while the event loop drops it from the LRU. If the number were closed then,
the kernel could give it to another file and the thread would read wrong bytes. So a descriptor is an object, closed
with its last reference, and whoever reads in a thread holds a reference.
"""

import contextlib
import os
import resource
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar

import trio

if TYPE_CHECKING:
    import outcome

K = TypeVar("K")
V = TypeVar("V")


MAX_KEPT = 1024  # descriptors that one LRU keeps open; what is not kept is opened again


def kept_open() -> int:
    """How many descriptors one LRU may keep: `MAX_KEPT`, or an eighth of what this process may have open at all."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_KEPT if limit == resource.RLIM_INFINITY else min(MAX_KEPT, limit // 8)


class Descriptor:
    """An open file descriptor, closed when the last reference to this object goes."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    # Bound here: when the interpreter ends, the module may be taken apart before the last descriptor.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        close(self.fd)


class SourceDescriptor(Descriptor):
    """One of the source, whose close(2) can take as long as the source likes: never in the event loop's thread."""

    __slots__ = ()

    def __del__(
        self, close: Callable[[int], None] = os.close, is_finalizing: Callable[[], bool] = sys.is_finalizing
    ) -> None:
        if not is_finalizing() and threading.current_thread() is threading.main_thread():
            with contextlib.suppress(RuntimeError):  # the system gives us no more threads
                trio.lowlevel.start_thread_soon(partial(close, self.fd), _ignore)
                return
        close(self.fd)


def _ignore(result: "outcome.Outcome[None]") -> None:
    pass


class LRU(Generic[K, V]):
    """The values used last, at most `limit` of them.

    Dropping one here does not close what somebody else still holds.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._values: OrderedDict[K, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: K) -> V | None:
        """The value of `key`, which is the most recently used one now; None if there is none."""
        value = self._values.get(key)
        if value is not None:
            self._values.move_to_end(key)
        return value

    def add(self, key: K, value: V) -> None:
        """Keep `value`; the one used longest ago goes if there are too many."""
        self._values[key] = value
        self._values.move_to_end(key)
        if len(self._values) > self._limit:
            self._values.popitem(last=False)

    def drop(self, key: K) -> None:
        """Let the value of `key` go, if there is one."""
        self._values.pop(key, None)
