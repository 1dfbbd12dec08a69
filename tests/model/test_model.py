"""Random changes at the source against what a view of it shows: a state machine with a model of files and versions.

The machine runs over a native read-only bind mount, which proves the model, and over dmfs with `--metadata-ttl 0`, so
that every change is to be seen by the next open, listing and stat. They differ in one thing, and `MayRead` says which:
what a handle shows that was opened before a change. Natively a file rewritten in place shows its new bytes; dmfs shows
the version that was opened, or fails with ESTALE, and never a mixture.
"""

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from tests.support.files import content
from tests.support.mounts import WAYS, MountFactory, read_only_bind, why_no_bind_mounts

FILE_NAMES = ["a", "b", "c"]
FOLDER_NAMES = ["d", "e"]
sizes = st.sampled_from([0, 1, 10, 4095, 4096, 4097, 10_000]) | st.integers(0, 30_000)
FIRST_MTIME = (
    1_600_000_000 * 10**9
)  # any; each change adds a nanosecond and a second, so that no two versions look alike
FIRST_SUBSTITUTE = 1 << 63  # inode numbers of pyfuse3, whose node ids and inode numbers are the same thing
COMPARED = ["st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_mtime_ns", "st_ctime_ns"]


@dataclass
class Inode:
    """A regular file: all contents it ever had, oldest first, and how often anything about it changed."""

    versions: list[bytes]
    changes: int = 0


@dataclass
class Handle:
    """An open file of the view: what it is of, and what that was when it was opened."""

    fd: int
    inode: Inode
    version: int = field(init=False)
    changes: int = field(init=False)

    def __post_init__(self) -> None:
        self.version = len(self.inode.versions) - 1
        self.changes = self.inode.changes


MayRead = Callable[[Handle, int, int, bytes | OSError], bool]
"""(handle, offset, length, outcome) -> whether a read through an old handle may have this outcome."""


def native_may_read(handle: Handle, offset: int, length: int, outcome: bytes | OSError) -> bool:
    """The present bytes of the inode, whatever was opened."""
    return outcome == handle.inode.versions[-1][offset : offset + length]


def dmfs_may_read(handle: Handle, offset: int, length: int, outcome: bytes | OSError) -> bool:
    """The bytes of the version that was opened. Once the file has changed also ESTALE, or cut at a newer end."""
    opened = handle.inode.versions[handle.version][offset : offset + length]
    if handle.inode.changes == handle.changes:
        return outcome == opened
    if isinstance(outcome, OSError):
        return outcome.errno == errno.ESTALE
    newer_ends = {max(0, len(version) - offset) for version in handle.inode.versions[handle.version + 1 :]}
    return outcome == opened or (len(outcome) in newer_ends and opened.startswith(outcome))


@dataclass
class Viewed:
    """The two sides under test: a writable source, the view of it, and the rule for old handles."""

    source: Path
    view: Path
    may_read: MayRead
    substitutes: bool = False  # a new version may show another inode number, see docs/semantics.md
    examples: int = 0


Node = Inode | str | None
"""A file, the target of a symbolic link, or None for a folder."""


class SourceAndView(RuleBasedStateMachine):
    """Changes the source and looks through the view. Each example lives in a new folder of the same mount."""

    def __init__(self, viewed: Viewed) -> None:
        super().__init__()
        self._may_read = viewed.may_read
        self._substitutes = viewed.substitutes
        viewed.examples += 1
        name = f"example-{viewed.examples}"
        self.source = viewed.source / name
        self.view = viewed.view / name
        self.spare = viewed.source / f"{name}.new"
        self.nodes: dict[str, Node] = {}
        self.handles: list[Handle] = []
        self.inodes = 0
        self.mtime = FIRST_MTIME
        self.source.mkdir()

    def teardown(self) -> None:
        """Compare once more, and leave nothing behind."""
        try:
            self._compare()
        finally:
            for handle in self.handles:
                os.close(handle.fd)
            shutil.rmtree(self.source)

    # The model: which paths there are.

    def _paths(self, kind: type | None) -> list[str]:
        """Paths of the files (Inode), links (str) or folders (None), sorted."""
        return sorted(p for p, node in self.nodes.items() if (node is None if kind is None else isinstance(node, kind)))

    def _new_path(self, data: st.DataObject, names: list[str]) -> str | None:
        """A path that does not exist in a folder that does, or None if the one drawn exists."""
        folder = data.draw(st.sampled_from(["", *self._paths(None)]), "folder")
        path = os.path.join(folder, data.draw(st.sampled_from(names), "name"))
        return None if path in self.nodes else path

    def _file(self, data: st.DataObject) -> tuple[str, Inode]:
        path = data.draw(st.sampled_from(self._paths(Inode)), "file")
        inode = self.nodes[path]
        assert isinstance(inode, Inode)
        return path, inode

    def _new_bytes(self, size: int) -> bytes:
        self.inodes += 1
        return content(self.inodes, 0, size)

    def _changed(self, inode: Inode, version: bytes | None = None) -> None:
        inode.changes += 1
        if version is not None:
            inode.versions.append(version)

    def _stamp(self, path: Path) -> None:
        """Give the file an mtime that no version had: two changes within one tick of the kernel's clock look alike."""
        self.mtime += 10**9 + 1
        os.utime(path, ns=(self.mtime, self.mtime))

    # Changes at the source.

    @initialize(first=sizes, second=sizes)
    def start_with_two_files(self, first: int, second: int) -> None:
        for name, size in (("a", first), ("b", second)):
            self._create(name, size)

    def _create(self, path: str, size: int) -> None:
        data = self._new_bytes(size)
        (self.source / path).write_bytes(data)
        self._stamp(self.source / path)
        self.nodes[path] = Inode([data])

    @rule(data=st.data(), size=sizes)
    def create(self, data: st.DataObject, size: int) -> None:
        if path := self._new_path(data, FILE_NAMES):
            self._create(path, size)

    @precondition(lambda self: self._paths(Inode))
    @rule(data=st.data(), size=sizes, same_size=st.booleans())
    def rewrite_in_place(self, data: st.DataObject, size: int, same_size: bool) -> None:
        path, inode = self._file(data)
        version = self._new_bytes(len(inode.versions[-1]) if same_size else size)
        (self.source / path).write_bytes(version)
        self._stamp(self.source / path)
        self._changed(inode, version)

    @precondition(lambda self: self._paths(Inode))
    @rule(data=st.data(), size=sizes)
    def append(self, data: st.DataObject, size: int) -> None:
        path, inode = self._file(data)
        more = self._new_bytes(size)
        with (self.source / path).open("ab") as file:
            file.write(more)
        self._stamp(self.source / path)
        self._changed(inode, inode.versions[-1] + more)

    @precondition(lambda self: self._paths(Inode))
    @rule(data=st.data(), size=sizes)
    def truncate(self, data: st.DataObject, size: int) -> None:
        path, inode = self._file(data)
        os.truncate(self.source / path, size)
        self._stamp(self.source / path)
        self._changed(inode, inode.versions[-1][:size].ljust(size, b"\0"))

    @precondition(lambda self: self._paths(Inode))
    @rule(data=st.data(), size=sizes)
    def replace_by_rename(self, data: st.DataObject, size: int) -> None:
        path, old = self._file(data)
        version = self._new_bytes(size)
        self.spare.write_bytes(version)
        self._stamp(self.spare)
        self.spare.rename(self.source / path)
        self._changed(old)
        self.nodes[path] = Inode([version])

    @precondition(lambda self: self._paths(Inode))
    @rule(data=st.data(), mode=st.sampled_from([0o600, 0o644, 0o755]))
    def chmod(self, data: st.DataObject, mode: int) -> None:
        path, inode = self._file(data)
        (self.source / path).chmod(mode)
        self._changed(inode)

    @precondition(lambda self: self._paths(Inode))
    @rule(data=st.data())
    def hard_link(self, data: st.DataObject) -> None:
        path, inode = self._file(data)
        if new := self._new_path(data, FILE_NAMES):
            (self.source / new).hardlink_to(self.source / path)
            self._changed(inode)
            self.nodes[new] = inode

    @precondition(lambda self: self._paths(Inode))
    @rule(data=st.data())
    def unlink(self, data: st.DataObject) -> None:
        path, inode = self._file(data)
        (self.source / path).unlink()
        self._changed(inode)
        del self.nodes[path]

    @rule(data=st.data(), text=st.sampled_from(["a", "d/b", "../nowhere", "c" * 300]))
    def symlink(self, data: st.DataObject, text: str) -> None:
        if path := self._new_path(data, FILE_NAMES):
            (self.source / path).symlink_to(text)
            self.nodes[path] = text

    @precondition(lambda self: self._paths(str))
    @rule(data=st.data())
    def unlink_symlink(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(self._paths(str)))
        (self.source / path).unlink()
        del self.nodes[path]

    @rule(data=st.data())
    def mkdir(self, data: st.DataObject) -> None:
        path = self._new_path(data, FILE_NAMES + FOLDER_NAMES)
        if path and path.count("/") < 2:
            (self.source / path).mkdir()
            self.nodes[path] = None

    @precondition(lambda self: self._paths(None))
    @rule(data=st.data())
    def remove_folder(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(self._paths(None)))
        shutil.rmtree(self.source / path)
        for each in [p for p in self.nodes if p == path or p.startswith(path + "/")]:
            if isinstance(inode := self.nodes.pop(each), Inode):
                self._changed(inode)

    @precondition(lambda self: self.nodes)
    @rule(data=st.data())
    def rename(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(self.nodes)), "path")
        new = self._new_path(data, FILE_NAMES if self.nodes[path] is not None else FOLDER_NAMES)
        if new is None or new.startswith(path + "/"):
            return
        (self.source / path).rename(self.source / new)
        for each in [p for p in self.nodes if p == path or p.startswith(path + "/")]:
            node = self.nodes[new + each[len(path) :]] = self.nodes.pop(each)
            if isinstance(node, Inode):
                self._changed(node)

    # Looks through the view.

    @precondition(lambda self: self._paths(Inode))
    @rule(data=st.data())
    def open_and_hold(self, data: st.DataObject) -> None:
        path, inode = self._file(data)
        handle = Handle(os.open(self.view / path, os.O_RDONLY), inode)
        self.handles.append(handle)
        size = os.fstat(handle.fd).st_size
        assert size == len(inode.versions[-1]), f"{path}: a new open has size {size}, not {len(inode.versions[-1])}"

    @precondition(lambda self: self.handles)
    @rule(data=st.data(), offset=sizes, length=sizes, drop_pages=st.booleans())
    def read_held(self, data: st.DataObject, offset: int, length: int, drop_pages: bool) -> None:
        handle = self.handles[data.draw(st.integers(0, len(self.handles) - 1), "handle")]
        if drop_pages:
            os.posix_fadvise(handle.fd, 0, 0, os.POSIX_FADV_DONTNEED)
        outcome: bytes | OSError
        try:
            outcome = os.pread(handle.fd, length, offset)
        except OSError as exc:
            outcome = exc
        assert self._may_read(handle, offset, length, outcome), (
            f"a handle of version {handle.version} of {len(handle.inode.versions)}, read at {offset} for {length}, "
            f"gave {_short(outcome)}; versions: {[_short(v[offset : offset + length]) for v in handle.inode.versions]}"
        )

    @precondition(lambda self: self.handles)
    @rule(data=st.data())
    def close_held(self, data: st.DataObject) -> None:
        os.close(self.handles.pop(data.draw(st.integers(0, len(self.handles) - 1), "handle")).fd)

    @precondition(lambda self: self._paths(Inode))
    @rule(data=st.data())
    def read_newly_opened(self, data: st.DataObject) -> None:
        path, inode = self._file(data)
        self._read_whole(path, inode)

    @rule(data=st.data())
    def look_for_what_is_missing(self, data: st.DataObject) -> None:
        if path := self._new_path(data, FILE_NAMES + FOLDER_NAMES):
            assert not os.path.lexists(self.view / path), f"{path} does not exist at the source"

    @rule()
    def compare_everything(self) -> None:
        self._compare()

    def _read_whole(self, path: str, inode: Inode) -> None:
        data = (self.view / path).read_bytes()
        assert data == inode.versions[-1], (
            f"{path}: a new open read {_short(data)}; versions: {[_short(v) for v in inode.versions]}"
        )

    def _compare(self) -> None:
        listed: set[str] = set()
        for folder, folders, files in os.walk(self.view):
            listed |= {os.path.relpath(os.path.join(folder, name), self.view) for name in folders + files}
        assert listed == set(self.nodes), f"listed and not there, or there and not listed: {listed ^ set(self.nodes)}"
        for path, node in self.nodes.items():
            seen, wanted = os.lstat(self.view / path), os.lstat(self.source / path)
            pairs = {f: (getattr(seen, f), getattr(wanted, f)) for f in COMPARED}
            if self._substitutes and seen.st_ino >= FIRST_SUBSTITUTE:
                del pairs["st_ino"]
            different = {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}
            assert not different, f"{path}: (seen, at the source) {different}"
            if isinstance(node, Inode):
                self._read_whole(path, node)
            elif node is None:
                assert stat.S_ISDIR(seen.st_mode)
            else:
                assert os.readlink(self.view / path) == node


def _short(outcome: bytes | OSError) -> str:
    return repr(outcome) if isinstance(outcome, OSError) else f"{len(outcome)} bytes {outcome[:40].hex()}"


def _run(viewed: Viewed, *, examples: int, steps: int, derandomize: bool = True) -> None:
    run_state_machine_as_test(
        lambda: SourceAndView(viewed),
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=derandomize,
            database=None,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert viewed.examples >= examples, "hypothesis ran fewer examples than asked"


@pytest.fixture
def viewed(request: pytest.FixtureRequest, disk_path: Path) -> Iterator[Viewed]:
    """A new source and the mounted view of it."""
    source = disk_path / request.node.name
    source.mkdir()
    with contextlib.ExitStack() as stack:
        if request.param == "native":
            if reason := why_no_bind_mounts():
                pytest.skip(reason)
            yield Viewed(source, stack.enter_context(read_only_bind(source)), native_may_read)
        else:
            factory = stack.enter_context(contextlib.closing(MountFactory()))
            mount = factory(source, way=request.param, immutable=False, flags=["--metadata-ttl", "0"])
            yield Viewed(source, mount.view, dmfs_may_read, substitutes=request.param == "pyfuse3")


@pytest.mark.slow
@pytest.mark.parametrize("viewed", ["native", *WAYS], indirect=True)
def test_random_changes_at_the_source(viewed: Viewed) -> None:
    _run(viewed, examples=30, steps=40)


class Script(st.DataObject):
    """What a rule draws, in order, in place of hypothesis' choice."""

    def __init__(self, *answers: object) -> None:
        self._answers = list(answers)

    def draw(self, strategy: object, label: object = None) -> Any:
        return self._answers.pop(0)


@pytest.mark.parametrize("viewed", ["native"], indirect=True)
def test_machine_finds_a_difference(viewed: Viewed) -> None:
    """A native mount breaks the rule of dmfs for old handles, and the machine must notice."""
    viewed.may_read = dmfs_may_read
    machine = SourceAndView(viewed)
    try:
        machine.start_with_two_files(first=8192, second=1)
        machine.open_and_hold(data=Script("a"))
        machine.read_held(data=Script(0), offset=0, length=8192, drop_pages=False)
        machine.rewrite_in_place(data=Script("a"), size=8192, same_size=True)
        with pytest.raises(AssertionError, match="a handle of version"):
            machine.read_held(data=Script(0), offset=0, length=8192, drop_pages=True)
    finally:
        machine.teardown()


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("viewed", ["native", *WAYS], indirect=True)
def test_many_random_changes_at_the_source(viewed: Viewed) -> None:
    _run(viewed, examples=600, steps=60, derandomize=False)
