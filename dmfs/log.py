"""Logging of the daemon: one line an event, and every surprise once.

`ErrorLog` keeps what `dmfs status` shows under `errors`; it is bounded, so a fault that repeats a million times costs
one entry.
"""

import logging
import os
import time
from collections import OrderedDict
from dataclasses import dataclass

logger = logging.getLogger("dmfs")

MAX_ERRORS = 32  # distinct messages kept for `dmfs status`; the oldest goes first


def open_private(path: str, flags: int) -> int:
    """An opener for `open`: a file it makes is for its owner alone, whatever the umask, as paths are in the log."""
    return os.open(path, flags, 0o600)


def setup(*, log_file: str | None, verbose: bool) -> None:
    """Send the log to `log_file` (appended) or to standard error."""
    handler: logging.Handler = logging.StreamHandler()
    if log_file:
        handler = logging.StreamHandler(open(log_file, "a", opener=open_private))  # noqa: SIM115 (open to the end)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.handlers[:] = [handler]
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    logger.propagate = False


@dataclass(slots=True)
class ErrorEntry:
    """One kind of fault: the sentence, how often it was met, and when last (seconds since 1970)."""

    message: str
    count: int
    last: float


class ErrorLog:
    """The faults met since the start, each kind once, newest last."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, ErrorEntry] = OrderedDict()

    def add(self, message: str, exc: BaseException | None = None, *, kind: str | None = None) -> None:
        """Count a fault; the first of its kind goes to the log, with the traceback of `exc` if one is given.

        Args:
            kind: what makes two faults the same, where the message alone says too much (a path, an offset).
        """
        key = kind or message
        entry = self._entries.get(key)
        if entry is None:
            self._entries[key] = ErrorEntry(message, 1, time.time())
            if len(self._entries) > MAX_ERRORS:
                self._entries.popitem(last=False)
            logger.error(message, exc_info=exc)
            return
        entry.count += 1
        entry.message = message
        entry.last = time.time()
        self._entries.move_to_end(key)

    def entries(self) -> list[dict[str, object]]:
        """`[{message, count, last}]`, oldest first, for `dmfs status`."""
        return [{"message": e.message, "count": e.count, "last": e.last} for e in self._entries.values()]
