"""Shared descriptors: open as long as anybody holds one, closed then, and no more kept than the limit."""

import gc
import os
import resource
from pathlib import Path

import pytest
import trio

from dmfs.tiers.descriptors import LRU, MAX_KEPT, Descriptor, SourceDescriptor, kept_open
from tests.operations.harness import until


def is_open(fd: int) -> bool:
    """Whether this process has the descriptor open."""
    return os.path.lexists(f"/proc/self/fd/{fd}")


@pytest.fixture
def fd(tmp_path: Path) -> int:
    """An open descriptor."""
    return os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)


def test_closed_with_the_last_reference(fd: int) -> None:
    descriptor = Descriptor(fd)
    other = descriptor
    del descriptor
    assert is_open(fd)
    del other
    assert not is_open(fd)


def test_dropped_from_the_set_while_a_thread_reads(fd: int) -> None:
    """What the event loop drops stays open for whoever still holds it: the number must not go to another file."""
    lru: LRU[bytes, Descriptor] = LRU(10)
    lru.add(b"k", Descriptor(fd))
    held = lru.get(b"k")
    lru.drop(b"k")
    lru.drop(b"k")
    assert held is not None
    assert is_open(fd)
    del held
    assert not is_open(fd)


def test_used_longest_ago_goes_first() -> None:
    lru: LRU[str, str] = LRU(3)
    for key in "abc":
        lru.add(key, key.upper())
    assert lru.get("a") == "A"
    lru.add("d", "D")
    assert [lru.get(key) for key in "abcd"] == ["A", None, "C", "D"]
    assert len(lru) == 3
    lru.add("a", "other")
    assert lru.get("a") == "other"
    assert len(lru) == 3


async def test_descriptor_of_the_source_is_closed_elsewhere(fd: int) -> None:
    """Its close can hang; the event loop must not wait for it."""
    with trio.fail_after(10):
        descriptor = SourceDescriptor(fd)
        assert is_open(fd)
        del descriptor
        gc.collect()
        await until(lambda: not is_open(fd), "it is closed")


def test_descriptor_of_the_source_is_closed_without_a_thread(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("trio.lowlevel.start_thread_soon", refuse)
    descriptor = SourceDescriptor(fd)
    del descriptor
    assert not is_open(fd)


@pytest.mark.parametrize(("limit", "kept"), [(1024, 128), (4096, 512), (1 << 20, MAX_KEPT), (-1, MAX_KEPT)])
def test_no_more_are_kept_than_a_share_of_what_the_process_may_have(
    monkeypatch: pytest.MonkeyPatch, limit: int, kept: int
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limit, limit))
    assert kept_open() == kept
