"""badsrc, the source that misbehaves: each rule does what it says, where it says, and counts it."""

import errno
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.lib.slowfs_client import SlowFsError
from tests.doubles.badsrc import BadSource
from tests.support.files import MiB, content, explain, write_file
from tests.support.mounts import why_no_mounts
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(why_no_mounts() is not None, reason=str(why_no_mounts()))

SIZE = 2 * MiB


@pytest.fixture
def bad(tmp_path: Path) -> Iterator[BadSource]:
    """A source of two files of 2 MiB and one in a folder, whose attributes the kernel does not remember."""
    source = tmp_path / "source"
    (source / "folder").mkdir(parents=True)
    for number, name in enumerate(("one", "two", "folder/three")):
        write_file(source / name, number, SIZE)
    with BadSource(source, tmp_path / "bad", attr_timeout=0) as bad:
        yield bad


def read(bad: BadSource, name: str, size: int = SIZE, offset: int = 0) -> bytes:
    fd = os.open(bad.mountpoint / name, os.O_RDONLY)
    try:
        return os.pread(fd, size, offset)
    finally:
        os.close(fd)


def test_without_rules_it_is_well(bad: BadSource) -> None:
    for number, name in enumerate(("one", "two", "folder/three")):
        assert explain(read(bad, name), number, 0) is None
    assert bad.hanging() == 0
    assert bad.counters().opens == 3


def test_calls_are_counted_per_rule(bad: BadSource) -> None:
    opens, ones, nested, others = (
        bad.rule("OPEN"),
        bad.rule("OPEN", "one"),
        bad.rule(path="folder/*"),
        bad.rule("MKDIR"),
    )
    for name in ("one", "one", "folder/three"):
        read(bad, name, 4096)
    assert (bad.calls(opens), bad.calls(ones), bad.calls(others)) == (3, 2, 0)
    assert bad.calls(nested) >= 3  # LOOKUP, OPEN, READ
    bad.remove(ones)
    read(bad, "one", 4096)
    assert bad.calls(opens) == 4
    with pytest.raises(SlowFsError):
        bad.calls(ones)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EACCES])
def test_an_errno_reaches_the_reader(bad: BadSource, code: int) -> None:
    rule = bad.rule("READ", "one", error=code)
    with pytest.raises(OSError, match=re.escape(os.strerror(code))) as caught:
        read(bad, "one")
    assert caught.value.errno == code
    assert bad.calls(rule) == 1
    assert explain(read(bad, "two"), 1, 0) is None
    bad.clear()
    assert explain(read(bad, "one"), 0, 0) is None


@pytest.mark.parametrize(
    ("operation", "path"),
    [("LOOKUP", "one"), ("OPEN", "one"), ("OPENDIR", ""), ("READDIR", ""), ("GETATTR", ""), ("STATFS", "")],
)
def test_every_operation_can_fail(bad: BadSource, operation: str, path: str) -> None:
    bad.rule(operation, path, error=errno.EREMOTEIO)
    acts: dict[str, Callable[[], object]] = {
        "LOOKUP": lambda: os.stat(bad.mountpoint / "one"),
        "OPEN": lambda: read(bad, "one"),
        "OPENDIR": lambda: os.listdir(bad.mountpoint),
        "READDIR": lambda: os.listdir(bad.mountpoint),
        "GETATTR": lambda: os.stat(bad.mountpoint),
        "STATFS": lambda: os.statvfs(bad.mountpoint),
    }
    with pytest.raises(OSError, match=re.escape(os.strerror(errno.EREMOTEIO))):
        acts[operation]()


def test_failing_a_few_times(bad: BadSource) -> None:
    rule = bad.rule("OPEN", "one", error=errno.EIO, times=2)
    for _ in range(2):
        with pytest.raises(OSError, match="Input/output"):
            read(bad, "one")
    assert explain(read(bad, "one"), 0, 0) is None
    assert bad.calls(rule) == 2


def test_failing_from_an_offset_on(bad: BadSource) -> None:
    bad.rule("READ", "one", error=errno.EIO, after=MiB)
    assert explain(read(bad, "one", MiB), 0, 0) is None
    for offset in (MiB - 1, MiB, SIZE - 4096):
        with pytest.raises(OSError, match="Input/output"):
            read(bad, "one", 4096, offset)


def test_short_reads(bad: BadSource) -> None:
    bad.rule("READ", "one", limit=10_000)
    data = read(bad, "one", 65536)
    assert data == content(0, 0, 10_000)
    assert read(bad, "one", 65536, 10_000) == content(0, 10_000, 10_000)
    assert read(bad, "one", 65536, SIZE - 5_000) == content(0, SIZE - 5_000, 5_000)
    assert len(read(bad, "two", 65536)) == 65536


def test_delays_add_up(bad: BadSource) -> None:
    bad.rule("OPEN", "one", delay=0.05)
    bad.rule("*", "o*", delay=0.05)
    began = time.monotonic()
    os.close(os.open(bad.mountpoint / "one", os.O_RDONLY))
    assert time.monotonic() - began >= 0.15  # LOOKUP once, OPEN twice
    began = time.monotonic()
    os.close(os.open(bad.mountpoint / "two", os.O_RDONLY))
    assert time.monotonic() - began < 0.15


def test_hanging_until_released(bad: BadSource) -> None:
    results: list[str | None] = []
    rule = bad.rule("READ", "one", hangs=True)
    thread = threading.Thread(target=lambda: results.append(explain(read(bad, "one", 4096), 0, 0)))
    thread.start()
    wait_until(lambda: bad.hanging() == 1, 10, "the read hangs")
    assert explain(read(bad, "two"), 1, 0) is None  # others go on
    bad.remove(rule)
    assert bad.hanging() == 1
    assert bad.release() == 1
    thread.join(10)
    assert results == [None]
    assert explain(read(bad, "one"), 0, 0) is None


def test_hanging_until_the_reader_is_killed(bad: BadSource) -> None:
    bad.rule("LOOKUP", "one", hangs=True)
    with subprocess.Popen(["stat", bad.mountpoint / "one"]) as reader:
        wait_until(lambda: bad.hanging() == 1, 10, "the look-up hangs")
        reader.kill()
        assert reader.wait(10) == -signal.SIGKILL
    assert bad.hanging() == 0
    assert bad.release() == 0


def test_stop_while_something_hangs(bad: BadSource) -> None:
    codes: list[int | None] = []

    def ask() -> None:
        try:
            os.statvfs(bad.mountpoint)
        except OSError as exc:
            codes.append(exc.errno)

    bad.rule("STATFS", hangs=True)
    thread = threading.Thread(target=ask)
    thread.start()
    wait_until(lambda: bad.hanging() == 1, 10, "the call hangs")
    bad.stop()
    thread.join(10)
    assert codes[0] in (errno.ENOTCONN, errno.ECONNABORTED)


def test_odd_attributes(bad: BadSource) -> None:
    odd = {"size": 7, "mtime": -3, "mtime_nsec": 999_999_999, "nlink": 3, "ino": 2**63 + 1, "blocks": 0}
    rule = bad.rule(path="one", attributes=odd)
    st = os.stat(bad.mountpoint / "one")
    assert (st.st_size, st.st_nlink, st.st_ino, st.st_blocks) == (7, 3, 2**63 + 1, 0)
    assert st.st_mtime_ns == -3 * 10**9 + 999_999_999
    assert os.stat(bad.mountpoint / "two").st_size == SIZE
    bad.remove(rule)
    assert os.stat(bad.mountpoint / "one").st_size == SIZE


def test_nonsense_is_refused(bad: BadSource) -> None:
    for attributes in ({"colour": 3}, {"size": -1}):
        with pytest.raises(SlowFsError):
            bad.rule(path="one", attributes=attributes)
    with pytest.raises(SlowFsError):
        bad.request(op="rule", operation="READ", path="*", mood="bad")
    assert explain(read(bad, "one"), 0, 0) is None
