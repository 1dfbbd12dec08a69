"""Copies on a tier by themselves: what a start finds, what is promised and given up, and that the account is right."""

import errno
import os
from pathlib import Path

import pytest
import trio
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from dmfs.errors import CopyDamaged, TierUnavailable
from dmfs.tiers.folder import open_folder
from dmfs.tiers.store import BLOCK, RETRY_AFTER, Copy, NoRoom, ReadMode, Store, copy_name, parse_name, sums_name
from dmfs.types import PIECE_SIZE, Clock, FileKey

KEY = bytes(range(16))
DIGEST = 0x0123456789ABCDEF
A_LOT = 1 << 40
SOURCE = "/data/set"


class Time:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.clock = Clock(monotonic=lambda: self.now)


@pytest.fixture
def time() -> Time:
    """The clock of the store."""
    return Time()


def make_store(
    tier: Path, *, time: Time | None = None, capacity: int = A_LOT, min_free: int = 0, read_mode: ReadMode = "memory"
) -> Store:
    """A store, not scanned yet."""
    folder = open_folder(str(tier), source=SOURCE, dataset_id=SOURCE)
    clock = (time or Time()).clock
    return Store(folder, capacity=capacity, min_free=min_free, read_mode=read_mode, clock=clock)


@pytest.fixture
def store(tmp_path: Path, time: Time) -> Store:
    """An empty store."""
    return make_store(tmp_path / "tier", time=time)


def key(number: int) -> FileKey:
    """A key."""
    return number.to_bytes(16, "big")


def folder_of(store: Store) -> Path:
    """The folder of the dataset."""
    return Path(store._folder.path)


def put(store: Store, number: int, size: int, *, sums: bool | None = None) -> Path:
    """A copy as an earlier daemon left it."""
    objects = folder_of(store) / "objects"
    path = objects / copy_name(key(number), number)
    with path.open("wb") as file:
        file.write(b"x" * min(size, 4096))
        file.truncate(size)
    if sums if sums is not None else size > PIECE_SIZE:
        (objects / sums_name(key(number))).write_bytes(b"s" * 16)
    return path


def put_of_other_dataset(tier: Path, size: int) -> None:
    """A copy of another dataset, whose daemon has ended."""
    folder = open_folder(str(tier), source="/other", dataset_id="/other")
    Path(folder.path, "objects/x").write_bytes(b"1" * size)


def allocated(store: Store, *, sums: bool = False) -> int:
    """What `du` says of the copies."""
    paths = [path for path in (folder_of(store) / "objects").iterdir() if sums or path.suffix != ".sums"]
    return sum(path.stat().st_blocks * 512 for path in paths)


async def scan(store: Store) -> None:
    """Scan, with a limit."""
    with trio.fail_after(10):
        await store.scan()
    assert store.scanned.is_set()


# ---- names


def test_names() -> None:
    assert copy_name(KEY, DIGEST) == "000102030405060708090a0b0c0d0e0f-0123456789abcdef"
    assert sums_name(KEY) == "000102030405060708090a0b0c0d0e0f.sums"
    for digest in (0, 1, 2**64 - 1):
        assert parse_name(copy_name(KEY, digest)) == (KEY, digest)
    assert parse_name(sums_name(KEY)) == (KEY, None)


NAME = copy_name(KEY, DIGEST)


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "rubbish",
        NAME[:-1],
        NAME + "0",
        NAME.upper(),
        NAME.replace("-", "_"),
        NAME[:32] + "-" + "_".join("01234567") + "0",
        NAME[:32] + "-0x" + "0" * 14,
        NAME[:33] + " " * 15 + "1",
        NAME[:31] + " " + NAME[32:],
        NAME[:32] + ".sum",
        NAME + "\n",
        NAME[1:32] + ".sums",
    ],
)
def test_what_is_no_name_of_ours(name: str) -> None:
    assert parse_name(name) is None


# ---- what a start finds


@pytest.mark.slow
async def test_scan_finds_the_copies(store: Store) -> None:
    for number in range(5000):
        put(store, number, number % 3 * 1000)
    for number in range(5000, 5010):
        put(store, number, 5 * PIECE_SIZE)
    await scan(store)
    assert all(store.get(key(number)) is not None for number in range(5010))
    assert store.get(key(5010)) is None
    assert store.statistics() == {
        "path": store.path,
        "capacity_bytes": A_LOT,
        "used_bytes": allocated(store),
        "held_bytes": 0,
        "copies": 5010,
        "state": "ok",
    }


async def test_copies_are_served_while_the_scan_goes_on(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dmfs.tiers.store.SCAN_BATCH", 10)
    for number in range(100):
        put(store, number, 10)
    seen: list[tuple[int, object]] = []
    take_over = store._take_over

    def watch(batch: list[tuple[FileKey, Copy]]) -> list[tuple[FileKey, Copy]]:
        refused = take_over(batch)
        seen.append((len(store._copies), store.statistics()["state"]))
        return refused

    monkeypatch.setattr(store, "_take_over", watch)
    await scan(store)
    assert seen[:2] == [(10, "scanning"), (20, "scanning")]
    assert store.statistics()["state"] == "ok"


async def test_copy_and_its_sums_go_together(store: Store) -> None:
    whole = put(store, 1, 2 * PIECE_SIZE)
    unproved = put(store, 2, 2 * PIECE_SIZE, sums=False)
    put(store, 3, 100, sums=True)
    (folder_of(store) / "objects" / sums_name(key(4))).write_bytes(b"s" * 16)
    await scan(store)
    assert sorted(path.name for path in (folder_of(store) / "objects").iterdir()) == sorted(
        [whole.name, sums_name(key(1)), copy_name(key(3), 3)]
    )
    assert not unproved.exists()
    assert (store.get(key(2)), store.get(key(4))) == (None, None)
    assert store.statistics()["used_bytes"] == allocated(store)


async def test_two_copies_of_one_version(store: Store) -> None:
    """One of them is wrong, and nobody can say which."""
    for size in (100, 2 * PIECE_SIZE):
        first = put(store, size, size)
        (first.parent / copy_name(key(size), DIGEST)).write_bytes(first.read_bytes())
    good = put(store, 3, 100)
    await scan(store)
    assert list(good.parent.iterdir()) == [good]
    assert store.statistics()["used_bytes"] == allocated(store)
    assert store.statistics()["copies"] == 1


async def test_scan_clears_what_was_left(store: Store) -> None:
    """A05, B11: a half-written copy is never served, and does not stay."""
    for name in (f"{key(1).hex()}.0", sums_name(key(1)), copy_name(key(2), 2)):
        (folder_of(store) / "tmp" / name).write_bytes(b"half")
    await scan(store)
    assert list((folder_of(store) / "tmp").iterdir()) == []
    assert store.statistics()["copies"] == 0


async def test_rubbish_does_not_stop_the_scan(store: Store) -> None:
    objects = folder_of(store) / "objects"
    (objects / "rubbish").write_bytes(b"x")
    (objects / "folder").mkdir()
    (folder_of(store) / "tmp/folder").mkdir()
    put(store, 1, 100)
    await scan(store)
    assert store.statistics()["copies"] == 1
    assert (objects / "rubbish").exists(), "not ours, not touched"


async def test_scan_counts_what_other_datasets_take(tmp_path: Path) -> None:
    put_of_other_dataset(tmp_path / "tier", 100_000)
    store = make_store(tmp_path / "tier", capacity=150_000)
    put(store, 1, 10_000)
    await scan(store)
    assert store.statistics()["used_bytes"] == 102_400 + 4096
    assert store.reserve(100_000) is None
    assert store.reserve(20_000) is not None


async def test_scan_of_a_tier_that_fails(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(store._folder.__class__, "clear_tmp", lambda self: fail())
    await scan(store)
    assert store.statistics()["state"] == "failing: no"


async def test_cancelled_scan_ends(store: Store) -> None:
    put(store, 1, 100)
    with trio.fail_after(10), trio.CancelScope() as scope:
        scope.cancel()
        await store.scan()
    assert store.scanned.is_set()


# ---- space


def account(store: Store) -> tuple[int, int, int]:
    """(used by copies, promised, of that not written yet)."""
    return store._used, store._reserved, store._unwritten


def test_reservation(tmp_path: Path) -> None:
    store = make_store(tmp_path / "tier", capacity=10 * BLOCK)
    store.scanned.set()
    first = store.reserve(BLOCK + 1)
    assert first is not None
    assert account(store) == (0, 2 * BLOCK, 2 * BLOCK)
    assert store.reserve(8 * BLOCK + 1) is None
    second = store.reserve(8 * BLOCK)
    assert second is not None
    assert store.reserve(1) is None
    assert store.reserve(0) is not None
    first.wrote(BLOCK)
    assert store.statistics()["used_bytes"] == BLOCK
    first.wrote(1)
    first.wrote(5 * BLOCK)
    assert account(store) == (0, 10 * BLOCK, 8 * BLOCK), "never more than was promised"
    first.release()
    second.release()
    assert account(store) == (0, 0, 0)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 50_000), st.sampled_from("rwdce")), max_size=60))
def test_account_is_never_wrong(tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[int, int, str]]) -> None:
    """Fills that are promised, write, are dropped or completed, and copies that are evicted, in any order."""
    capacity = 100_000
    store = _shared_store(tmp_path_factory)
    store.capacity = capacity
    running: dict[int, tuple[object, int]] = {}
    copies: dict[int, int] = {}
    for number, size, action in steps:
        if action == "r" and number not in running and number not in copies:
            reservation = store.reserve(size)
            rounded = -(-size // BLOCK) * BLOCK
            promised = sum(-(-promise // BLOCK) * BLOCK for _, promise in running.values())
            assert (reservation is None) is (sum(copies.values()) + promised + rounded > capacity)
            if reservation is not None:
                running[number] = reservation, size
        elif action == "w" and number in running:
            running[number][0].wrote(size)  # type: ignore[attr-defined]
        elif action in "dc" and number in running:
            reservation, promise = running.pop(number)  # type: ignore[assignment]
            if action == "c":
                copies[number] = min(size, promise)
                store.add(key(number), Copy(number, copies[number]))
            reservation.release()  # type: ignore[union-attr]
        elif action == "e":
            assert store.evict(key(number)) is (number in copies)
            copies.pop(number, None)
        assert store._used == sum(copies.values())
        assert 0 <= store._unwritten <= store._reserved
        assert store._used + store._reserved <= capacity
    for reservation, _ in running.values():
        reservation.release()  # type: ignore[attr-defined]
    for number in copies:
        store.evict(key(number))
    assert account(store) == (0, 0, 0)


_stores: list[Store] = []


def _shared_store(factory: pytest.TempPathFactory) -> Store:
    """One store for all examples: it is empty after each."""
    if not _stores:
        _stores.append(make_store(factory.mktemp("account") / "tier"))
    return _stores[0]


def test_tier_in_trouble_is_left_alone_for_a_while(store: Store, time: Time) -> None:
    store.scanned.set()
    store.report(OSError(errno.EDQUOT, "no"))
    assert store.statistics()["state"] == "full"
    store.report(OSError(errno.EIO, "Input/output error"))
    assert store.statistics()["state"] == "failing: Input/output error"
    assert store.reserve(1) is None
    time.now += RETRY_AFTER
    assert store.reserve(1) is not None
    assert store.statistics()["state"] != "ok", "not before something has worked"
    store.add(KEY, Copy(DIGEST, 4096))
    assert store.statistics()["state"] == "ok"


def test_min_free(store: Store, time: Time, monkeypatch: pytest.MonkeyPatch) -> None:
    free = 10_000_000
    real = os.fstatvfs

    def statvfs(fd: int) -> os.statvfs_result:
        values = list(real(fd))
        values[1], values[4] = 1, free  # f_frsize, f_bavail
        return os.statvfs_result(values)

    monkeypatch.setattr(os, "fstatvfs", statvfs)
    store._min_free = 4_000_000
    small, large = store.reserve(1_000_000), store.reserve(5_100_000)
    assert small is not None
    assert large is not None
    with pytest.raises(NoRoom):
        store.check_room(5_100_000)
    large.release()
    store.check_room(1_000_000)
    assert store.reserve(5_100_000) is None, "not asked again for a while"
    time.now += RETRY_AFTER
    assert store.reserve(5_100_000) is not None
    with pytest.raises(NoRoom):
        store.create(KEY, 5_100_000)
    assert list((folder_of(store) / "tmp").iterdir()) == []


# ---- from a temporary file to a copy


def write_copy(store: Store, number: int, data: bytes) -> Copy:
    """What a fill does."""
    temp = store.create(key(number), len(data))
    store.write(temp, memoryview(data), 0)
    digest: int = xxhash.xxh3_64_intdigest(data)
    size = store.allocated(temp)
    store.publish(key(number), digest, temp.name)
    copy = Copy(digest, size)
    store.add(key(number), copy)
    return copy


@pytest.mark.parametrize("mode", ["memory", "nowait", "thread"])
def test_published_copy_is_read(tmp_path: Path, mode: ReadMode) -> None:
    store = make_store(tmp_path / "tier", read_mode=mode)
    data = bytes(range(256)) * 100
    copy = write_copy(store, 1, data)
    assert [path.name for path in (folder_of(store) / "objects").iterdir()] == [copy_name(key(1), copy.digest)]
    assert list((folder_of(store) / "tmp").iterdir()) == []
    descriptor = store.open_copy_nowait(key(1)) or store.open_copy(key(1), copy)
    for offset, length in ((0, len(data)), (5, 10), (len(data) - 1, 1)):
        view = memoryview(bytearray(length))
        if not store.read_nowait(descriptor, view, offset):
            store.read(descriptor, view, offset)
        assert view == data[offset : offset + length]
    assert (mode == "thread") is (store.open_copy_nowait(key(1)) is None) or mode == "nowait"
    assert store.seek(descriptor, 0, os.SEEK_HOLE) == len(data)
    with pytest.raises(OSError, match="No such device or address"):
        store.seek(descriptor, len(data), os.SEEK_DATA)
    assert store.statistics()["used_bytes"] == allocated(store)


def test_reading_past_a_damaged_end(store: Store) -> None:
    copy = write_copy(store, 1, b"x" * 5000)
    os.truncate(folder_of(store) / "objects" / copy_name(key(1), copy.digest), 4000)
    descriptor = store.open_copy(key(1), copy)
    view = memoryview(bytearray(5000))
    assert not store.read_nowait(descriptor, view, 0)
    with pytest.raises(CopyDamaged):
        store.read(descriptor, view, 0)


def test_copy_that_somebody_removed(store: Store) -> None:
    copy = write_copy(store, 1, b"x")
    (folder_of(store) / "objects" / copy_name(key(1), copy.digest)).unlink()
    assert store.open_copy_nowait(key(1)) is None
    with pytest.raises(CopyDamaged):
        store.open_copy(key(1), copy)


@pytest.mark.parametrize("is_published", [False, True])
def test_unpublished_copy_is_found_under_either_name(store: Store, is_published: bool) -> None:
    temp = store.create(key(1), 3)
    store.write(temp, memoryview(b"abc"), 0)
    copy = Copy(DIGEST, 4096, temp.name)
    store.add(key(1), copy)
    if is_published:
        store.publish(key(1), DIGEST, temp.name)  # in a thread; `published` is still to come
    view = memoryview(bytearray(3))
    store.read(store.open_copy(key(1), copy), view, 0)
    assert view == b"abc"
    store.discard(key(1))
    assert [path.name for part in ("objects", "tmp") for path in (folder_of(store) / part).iterdir()] == []
    assert store._used == 0


def test_faults_of_the_disk_are_the_tiers(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    temp = store.create(key(1), 3)
    with pytest.raises(TierUnavailable):
        store.publish(key(1), DIGEST, "not there")
    with pytest.raises(TierUnavailable):
        store.create(key(2), 1 << 62)
    assert len(list((folder_of(store) / "tmp").iterdir())) == 1
    os.close(temp.descriptor.fd)
    with pytest.raises(TierUnavailable):
        store.write(temp, memoryview(b"abc"), 0)
    with pytest.raises(TierUnavailable):
        store.allocated(temp)
    temp.descriptor.fd = os.open("/dev/null", os.O_RDONLY)  # for its __del__


def test_digests_of_pieces(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write_sums(key(1), b"12345678")
    assert (folder_of(store) / "objects" / sums_name(key(1))).read_bytes() == b"12345678"
    assert list((folder_of(store) / "tmp").iterdir()) == []

    def fail(*args: object, **options: object) -> None:
        raise OSError(errno.EIO, "no")

    monkeypatch.setattr(os, "rename", fail)
    with pytest.raises(TierUnavailable):
        store.write_sums(key(2), b"12345678")
    assert list((folder_of(store) / "tmp").iterdir()) == []


# ---- giving up


def test_evict_respects_pins(store: Store) -> None:
    write_copy(store, 1, b"x" * 10_000)
    store.pin(key(1))
    store.pin(key(1))
    assert not store.evict(key(1))
    store.unpin(key(1))
    assert not store.evict(key(1))
    store.unpin(key(1))
    assert store.evict(key(1))
    assert not store.evict(key(1))
    assert store._pins == {}
    assert store.statistics()["used_bytes"] == allocated(store) == 0


def test_pin_of_a_copy_to_come(store: Store) -> None:
    store.pin(key(1))
    write_copy(store, 1, b"x")
    assert not store.evict(key(1))


def test_discarded_copy_is_readable_by_who_has_it_open(store: Store) -> None:
    copy = write_copy(store, 1, b"abc")
    store.write_sums(key(1), b"12345678")
    store.pin(key(1))
    descriptor = store.open_copy(key(1), copy)
    store.discard(key(1))
    view = memoryview(bytearray(3))
    store.read(descriptor, view, 0)
    assert view == b"abc"
    assert list((folder_of(store) / "objects").iterdir()) == []
    store.unpin(key(1))
