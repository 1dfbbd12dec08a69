"""What a POSIX check gets, and the two helpers all checks use. No mounting here."""

import contextlib
import errno
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Target:
    """A read-only view under test.

    Attributes:
        name: `native`, or the name of a front end of dmfs.
        view: the mounted view of `source`.
        source: the directory itself, writable; only `mutable` below it may be changed by a check.
        scratch: a writable folder on the file system of the source.
    """

    name: str
    view: Path
    source: Path
    scratch: Path

    @property
    def mutable(self) -> str:
        """Relative path of the folder whose source this target's checks may change."""
        return f"mutable/{self.name}"


Check = Callable[[Target], None]


class Registry(dict[str, Check]):
    """Checks by name. A theme module makes one and fills it with `@registry.add`."""

    def add(self, function: Check) -> Check:
        """Register a function under its own name."""
        assert function.__name__ not in self, f"two checks named {function.__name__}"
        self[function.__name__] = function
        return function


@contextlib.contextmanager
def raises_errno(*codes: int) -> Iterator[None]:
    """Assert that the block fails with one of these errnos."""
    names = " or ".join(errno.errorcode[code] for code in codes)
    try:
        yield
    except OSError as exc:
        if exc.errno not in codes:
            raise AssertionError(f"expected {names}, got {errno.errorcode.get(exc.errno or 0)}: {exc}") from exc
    else:
        raise AssertionError(f"expected {names}, but it succeeded")
