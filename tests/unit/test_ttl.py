"""Promise 7, the rule by itself: a tenth of the age, at least a minute, at most an hour."""

import errno
import os
from pathlib import Path

import pytest

from dmfs.fuse.ttl import FOREVER, MetadataTtl, is_away
from dmfs.types import Attributes, Clock, pack_attributes


@pytest.fixture
def attributes(tmp_path: Path) -> Attributes:
    """Those of a file made now."""
    (tmp_path / "f").touch()
    return pack_attributes((tmp_path / "f").lstat())


def rule(path: Path, age: float, **options: object) -> MetadataTtl:
    """A rule, asked when the file is `age` seconds old."""
    wall = (path / "f").lstat().st_ctime_ns / 1e9 + age
    return MetadataTtl(Clock(wall=lambda: wall), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("age", "ttl"),
    [
        (-3600.0, 60.0),  # the source's clock is ahead of ours
        (0.0, 60.0),
        (599.0, 60.0),
        (601.0, 60.1),
        (6000.0, 600.0),
        (36_000.0, 3600.0),
        (1e9, 3600.0),
    ],
)
def test_tenth_of_the_age(tmp_path: Path, attributes: Attributes, age: float, ttl: float) -> None:
    assert rule(tmp_path, age).of(attributes) == pytest.approx(ttl, abs=1e-3)


@pytest.mark.parametrize("age", [0.0, 1e9])
def test_ctime_counts_and_not_mtime(tmp_path: Path, attributes: Attributes, age: float) -> None:
    os.utime(tmp_path / "f", (0, 0))
    attributes = pack_attributes((tmp_path / "f").lstat())
    assert rule(tmp_path, age).of(attributes) == (60.0 if not age else 3600.0)


@pytest.mark.parametrize("fixed", [0.0, 5.0, 1e6])
def test_given_value_is_for_everything(tmp_path: Path, attributes: Attributes, fixed: float) -> None:
    ttl = rule(tmp_path, 1e9, fixed=fixed)
    assert ttl.of(attributes) == fixed
    assert ttl.of_missing(attributes) == min(60.0, fixed)


def test_missing_name_lives_as_its_folder_but_a_minute_at_most(tmp_path: Path, attributes: Attributes) -> None:
    assert rule(tmp_path, 0.0).of_missing(attributes) == 60.0
    assert rule(tmp_path, 1e9).of_missing(attributes) == 60.0


def test_immutable_is_for_ever(tmp_path: Path, attributes: Attributes) -> None:
    ttl = rule(tmp_path, 0.0, fixed=1.0, is_immutable=True)
    assert ttl.of(attributes) == ttl.of_missing(attributes) == FOREVER


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EINTR])
def test_errors_that_say_the_source_could_not_be_asked(code: int) -> None:
    assert is_away(OSError(code, ""))


@pytest.mark.parametrize("code", [errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP])
def test_errors_that_are_an_answer(code: int) -> None:
    assert not is_away(OSError(code, ""))
