"""From exceptions to what a reader is told, and errors that several are told of."""

import errno
import gc
import weakref

import pytest

from dmfs.errors import CopyDamaged, StaleFile, TierUnavailable, to_errno, without_traceback


@pytest.mark.parametrize(
    ("exc", "code"),
    [
        (OSError(errno.ETIMEDOUT, "late"), errno.ETIMEDOUT),
        (OSError("no number"), errno.EIO),
        (FileNotFoundError(errno.ENOENT, "gone"), errno.ENOENT),
        (StaleFile("changed"), errno.ESTALE),
        (TierUnavailable("a tier's fault is no reader's"), None),
        (ValueError("a surprise"), None),
    ],
)
def test_errno(exc: Exception, code: int | None) -> None:
    assert to_errno(exc) == code


class Held:
    """Something that a frame holds."""


def fail(exc: Exception, held: list[weakref.ref[Held]]) -> None:
    something = Held()
    held.append(weakref.ref(something))
    raise exc


@pytest.mark.parametrize("exc", [OSError(errno.EIO, "no"), StaleFile("a"), CopyDamaged("b"), TierUnavailable("c")])
def test_kept_error_holds_no_frames(exc: Exception) -> None:
    held: list[weakref.ref[Held]] = []
    kept: Exception | None = None
    gc.disable()
    try:
        try:
            fail(exc, held)
        except Exception as caught:
            kept = without_traceback(caught)
            caught.__traceback__ = None
        assert held[0]() is None
    finally:
        gc.enable()
    assert kept is not None
    assert type(kept) is type(exc)
    assert kept.args == exc.args
    assert to_errno(kept) == to_errno(exc)


def test_surprise_stays_what_it_is() -> None:
    exc = UnicodeDecodeError("utf-8", b"x", 0, 1, "no")
    assert without_traceback(exc) is exc
