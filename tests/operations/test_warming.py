"""Files made ready before they are asked for: fetched whole, pushed as far as there is memory, failures named."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import trio

from dmfs import memory
from dmfs.errors import ConfigError
from dmfs.fuse import warming
from dmfs.fuse.warming import Warmer
from dmfs.metrics import WarmProgress
from dmfs.tiers.descriptors import Descriptor
from dmfs.types import KiB, MiB
from tests.operations.harness import LIMIT, Node, run_node
from tests.support.files import content, write_file

LARGE = 9 * MiB + 5  # three pieces, more than an open waits for
SMALL = 300_000


class Kernel:
    """Stands for the session: takes what is pushed."""

    def __init__(self, *, passes: bool = False) -> None:
        self.passthrough: Any = object() if passes else None
        self.notifier = self
        self.pushed: dict[int, bytes] = {}
        self.refuses = False

    async def push(self, node: int, copy: Descriptor, size: int) -> bool:
        await trio.lowlevel.checkpoint()
        if self.refuses:
            return False
        self.pushed[node] = os.pread(copy.fd, size, 0)
        return True


def make(base: Path, *sizes: int) -> list[bytes]:
    """Files f0, f1... in the source below a node's base."""
    (base / "source").mkdir(exist_ok=True)
    for number, size in enumerate(sizes):
        write_file(base / f"source/f{number}", number, size)
    return [b"f%d" % number for number in range(len(sizes))]


async def warm(
    node: Node, paths: list[bytes], *, push: bool = False, kernel: Kernel | None = None, before: int = 0
) -> WarmProgress:
    """A whole request."""
    progress = WarmProgress()
    warmer = Warmer(node.operations, kernel, node.metrics.pushes)  # type: ignore[arg-type]
    with trio.fail_after(LIMIT):
        await warmer.warm(paths, push, before, progress)
    return progress


async def test_files_are_fetched_whole_and_once(tmp_path: Path) -> None:
    paths = make(tmp_path, 0, 1, SMALL, LARGE)
    async with run_node(tmp_path) as node:
        progress = await warm(node, paths)
        assert (progress.files, progress.fetched, progress.failures) == (4, 3, 0)
        assert progress.bytes == progress.fetched_bytes == 1 + SMALL + LARGE
        assert len(node.copies()) == 3
        assert node.metrics.source.bytes == 1 + SMALL + LARGE
        progress = await warm(node, paths)
        assert (progress.files, progress.fetched) == (4, 0)
        assert node.metrics.source.bytes == 1 + SMALL + LARGE
        await node.assert_settled()


async def test_many_at_once(tmp_path: Path) -> None:
    paths = make(tmp_path, *[10 * KiB] * 200)
    async with run_node(tmp_path) as node:
        assert (await warm(node, paths)).fetched == 200
        await node.assert_settled()


async def test_what_does_not_fit_is_counted(tmp_path: Path) -> None:
    paths = make(tmp_path, SMALL, LARGE)
    async with run_node(tmp_path, capacities=(MiB,)) as node:
        progress = await warm(node, paths)
        assert (progress.files, progress.no_room, progress.failures) == (1, 1, 0)


async def test_the_next_tier_takes_what_one_cannot(tmp_path: Path) -> None:
    paths = make(tmp_path, LARGE)
    async with run_node(tmp_path, capacities=(MiB, 100 * MiB)) as node:
        assert (await warm(node, paths)).fetched == 1
    (tmp_path / "failing").mkdir()
    make(tmp_path / "failing", LARGE)
    async with run_node(tmp_path / "failing", capacities=(100 * MiB, 100 * MiB)) as node:
        node.tier_faults[0].fail("write", errno.EIO)
        assert (await warm(node, paths)).fetched == 1
        assert [len(node.copies(tier)) for tier in (0, 1)] == [0, 1]


@pytest.mark.parametrize("size", [SMALL, LARGE])
async def test_failures_of_the_source_are_named(tmp_path: Path, size: int) -> None:
    paths = make(tmp_path, size, SMALL)
    (tmp_path / "source/folder").mkdir()
    async with run_node(tmp_path) as node:
        node.faults.fail("read", errno.EIO, path=b"f0")
        progress = await warm(node, [*paths, b"missing", b"folder"])
        assert (progress.files, progress.failures) == (1, 3)
        assert dict(progress.failed) == {
            "f0": "Input/output error",
            "missing": "No such file or directory",
            "folder": "not a regular file",
        }
        node.faults.clear()
        assert (await warm(node, paths)).fetched == 1


async def test_a_file_that_changes_meanwhile_is_named(tmp_path: Path) -> None:
    paths = make(tmp_path, LARGE)
    async with run_node(tmp_path) as node:
        held = node.faults.hold("read", path=b"f0")
        progress = WarmProgress()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(Warmer(node.operations, None, node.metrics.pushes).warm, paths, False, 0, progress)
            await held.wait_entered()
            write_file(tmp_path / "source/f0", 0, SMALL, version=1)
            held.release()
        assert progress.failed == [("f0", "changed at the source meanwhile")]


async def test_no_more_failures_are_named_than_a_person_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "MAX_NAMED", 2)
    make(tmp_path)
    async with run_node(tmp_path) as node:
        progress = await warm(node, [b"a", b"b", b"c"])
        assert (progress.failures, len(progress.failed)) == (3, 2)


async def test_files_that_the_kernel_knows_are_pushed(tmp_path: Path) -> None:
    paths = make(tmp_path, SMALL, LARGE, 0, SMALL)
    async with run_node(tmp_path) as node:
        kernel = Kernel()
        nodes = [(await node.lookup(path)).node for path in paths[:3]]
        progress = await warm(node, paths, push=True, kernel=kernel)
        assert kernel.pushed == {nodes[0]: content(0, 0, SMALL), nodes[1]: content(1, 0, LARGE)}
        assert (progress.files, progress.pushed, progress.pushed_bytes) == (4, 2, SMALL + LARGE)
        assert node.metrics.pushes.as_dict() == {"files": 2, "bytes": SMALL + LARGE}
        await node.assert_settled()


async def test_what_the_kernel_refuses_counts_as_not_pushed(tmp_path: Path) -> None:
    paths = make(tmp_path, SMALL)
    async with run_node(tmp_path) as node:
        await node.lookup(paths[0])
        kernel = Kernel()
        kernel.refuses = True
        progress = await warm(node, paths, push=True, kernel=kernel)
        assert (progress.files, progress.pushed, progress.pushed_bytes, progress.no_memory) == (1, 0, 0, 0)


async def test_no_more_is_pushed_than_half_of_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = make(tmp_path, *[SMALL] * 6)
    async with run_node(tmp_path) as node:
        for path in paths:
            await node.lookup(path)
        monkeypatch.setattr(memory, "available", lambda: 10 * SMALL)
        progress = await warm(node, paths, push=True, kernel=Kernel(), before=2 * SMALL)
        assert (progress.files, progress.pushed, progress.no_memory) == (6, 3, 3)


async def test_a_mount_that_cannot_push_says_so(tmp_path: Path) -> None:
    make(tmp_path)
    async with run_node(tmp_path) as node:
        with pytest.raises(ConfigError, match="pyfuse3"):
            await warm(node, [], push=True)
        with pytest.raises(ConfigError, match="passthrough"):
            await warm(node, [], push=True, kernel=Kernel(passes=True))
