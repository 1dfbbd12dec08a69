"""Which files get a second look, and that the queue of them stays in order. What follows is in tests/operations."""

import os
from pathlib import Path

import pytest
import trio

from dmfs.metrics import Metrics
from dmfs.tiers.recheck import A_DAY, BATCH, CLOSE_TO_NEWEST, Recheck
from dmfs.tiers.source import Source
from dmfs.tiers.store import Copy, Store
from dmfs.types import Clock, DataFile, FileVersion, unpack_attributes

NOW = 1_700_000_000.0
SECOND = 10**9


def make_source(folder: Path, clock: Clock) -> Source:
    """A source over a folder."""
    return Source(str(folder), metrics=Metrics(), clock=clock, metadata_threads=2, data_threads=2)


def young(ctime_ns: int, *, newest_ns: int, tmp_path: Path, is_immutable: bool = False) -> bool:
    """Whether a file of this ctime gets a second look at NOW."""
    clock = Clock(wall=lambda: NOW)
    source = make_source(tmp_path, clock)
    source.newest_ctime_ns = newest_ns
    recheck = Recheck(source, clock=clock, is_immutable=is_immutable, on_changed=lambda file: None)
    return recheck.is_needed(DataFile(b"f", FileVersion(1, 1, ctime_ns), b"k" * 16))


@pytest.mark.parametrize("shift", [0, -7200 * SECOND, 7200 * SECOND])
@pytest.mark.parametrize(("age_by_source", "is_young"), [(0, True), (59, True), (60, True), (61, False), (3600, False)])
def test_close_to_the_newest_of_the_source(tmp_path: Path, age_by_source: int, is_young: bool, shift: int) -> None:
    """By the source's own clock, whatever ours says."""
    newest = int(NOW * SECOND) + shift
    assert young(newest - age_by_source * SECOND, newest_ns=newest, tmp_path=tmp_path) is is_young


@pytest.mark.parametrize(("age", "is_young"), [(A_DAY - 1, True), (A_DAY + 1, False), (1e8, False)])
def test_older_than_a_day_is_not_young(tmp_path: Path, age: float, is_young: bool) -> None:
    """However quiet the source was since."""
    ctime = int((NOW - age) * SECOND)
    assert young(ctime, newest_ns=ctime, tmp_path=tmp_path) is is_young


def test_immutable_is_never_young(tmp_path: Path) -> None:
    ctime = int(NOW * SECOND)
    assert not young(ctime, newest_ns=ctime, tmp_path=tmp_path, is_immutable=True)


async def test_newest_is_learnt_from_every_stat(tmp_path: Path) -> None:
    (tmp_path / "old").touch()
    (tmp_path / "new").touch()
    os.utime(tmp_path / "new", (0, 0))
    source = make_source(tmp_path, Clock())
    with trio.fail_after(10):
        for name in (b"new", b"old", b""):
            await source.lstat(name)
    assert source.newest_ctime_ns == max(os.lstat(tmp_path / name).st_ctime_ns for name in ("new", "old", ""))
    assert CLOSE_TO_NEWEST == 60 * SECOND


class FakeStore:
    """A store of copies that are nowhere."""

    def __init__(self) -> None:
        self.copies: dict[bytes, Copy] = {}
        self.names: list[str] = []

    def get(self, key: bytes) -> Copy | None:
        return self.copies.get(key)

    def discard(self, key: bytes) -> None:
        del self.copies[key]

    def publish(self, key: bytes, digest: int, temp_name: str) -> None:
        self.names.append(temp_name)

    def published(self, key: bytes) -> None:
        self.copies[key].temp = None


async def test_many_files(tmp_path: Path) -> None:
    """In order, many in one thread, changed and given-up ones left out, and an end when it drains."""
    now = 100.0
    source = make_source(tmp_path, Clock(monotonic=lambda: now))
    store, changed = FakeStore(), []
    recheck = Recheck(
        source,
        clock=Clock(wall=lambda: NOW, monotonic=lambda: now),
        is_immutable=False,
        on_changed=lambda file: changed.append(file.path),
    )
    count = 3 * BATCH
    with trio.fail_after(10):
        for number in range(count):
            name = b"f%d" % number
            (tmp_path / name.decode()).touch()
            attributes = unpack_attributes(await source.lstat(name))
            version = FileVersion(attributes.size, attributes.mtime_ns, attributes.ctime_ns)
            file = DataFile(name, version, name)
            copy = store.copies[name] = Copy(number, 0, f"temp{number}")
            recheck.add(file, store, copy)  # type: ignore[arg-type]
        (tmp_path / "f5").unlink()
        (tmp_path / "f6").write_bytes(b"changed")
        del store.copies[b"f7"]
        store.copies[b"f8"] = Copy(0, 0, "another")
        assert len(recheck) == count
        now += 2.0
        async with trio.open_nursery() as nursery:
            nursery.start_soon(recheck.run)
            recheck.drain()
            await recheck.finished.wait()
    assert store.names == [f"temp{number}" for number in range(count) if number not in (5, 6, 7, 8)]
    assert changed == [b"f5", b"f6"]
    assert len(recheck) == 0


def test_fake_is_like_the_store() -> None:
    assert all(hasattr(Store, name) for name in ("get", "discard", "publish", "published"))
