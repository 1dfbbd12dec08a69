"""Both front ends on real mounts over a fake `Operations` that fails, hesitates or waits in each of its methods."""

import errno
import inspect
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from dmfs.errors import FuseUnavailable
from dmfs.fuse import mounting, portable
from dmfs.fuse.operations import Operations
from tests.mount.front_end_runner import FILE_SIZE, FSNAME, LIST_LENGTH, TIMES, Served
from tests.operations.fake_operations import FakeOperations
from tests.support.files import content, drop_pages, raw_listing
from tests.support.mounts import REPOSITORY, is_mounted, why_no_mounts
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(why_no_mounts() is not None, reason=why_no_mounts() or "")

TEST_TIMEOUT = 30.0  # seconds until the mount is killed under a test that is stuck in it
SUBSTITUTES = 1 << 63  # pyfuse3 front end: inode numbers from here on are not the source's

Arm = Callable[[], None]
Action = Callable[[Path, Arm], None]


@pytest.fixture(scope="module", params=["kernel", "pyfuse3"])
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    """One mount of each front end for all tests, each of which leaves it working."""
    if request.param == "pyfuse3":
        pytest.importorskip("pyfuse3", reason="pyfuse3 is not installed")
    served = Served(request.param)
    assert served.error is None
    yield served
    served.close()


@pytest.fixture
def front(served: Served) -> Iterator[Served]:
    """The mount, with no rules yet; afterwards it has to live, and the front end to have kept to the interface."""
    with served.watched(TEST_TIMEOUT):
        served.do("reset")
        yield served
        served.do("reset")
        assert served.process.poll() is None, served.log()
        assert served.state()["misuse"] == []


# What a reader does to make the kernel call a method. `arm` is called when only that method is still to come.


def do_lookup(view: Path, arm: Arm) -> None:
    arm()
    os.stat(view / "file")


def do_getattr(view: Path, arm: Arm) -> None:
    fd = os.open(view / "file", os.O_RDONLY)
    try:
        arm()
        assert os.fstat(fd).st_size == FILE_SIZE
    finally:
        os.close(fd)


def do_readlink(view: Path, arm: Arm) -> None:
    arm()
    assert os.readlink(next(view.glob("fresh-link*"))) == "target"


def do_open(view: Path, arm: Arm) -> None:
    arm()
    os.close(os.open(view / "file", os.O_RDONLY))


def do_read(view: Path, arm: Arm) -> None:
    drop_pages(view / "file")
    fd = os.open(view / "file", os.O_RDONLY)
    try:
        arm()
        assert os.pread(fd, 10_000, 300_000) == content(1, 300_000, 10_000)
    finally:
        os.close(fd)


def do_lseek(view: Path, arm: Arm) -> None:
    fd = os.open(view / "file", os.O_RDONLY)
    try:
        arm()
        os.lseek(fd, 0, os.SEEK_HOLE)
    finally:
        os.close(fd)


def do_list(view: Path, arm: Arm) -> None:
    drop_pages(view / "dir")
    arm()
    assert os.listdir(view / "dir") == ["0", "1", "2"]


def do_statfs(view: Path, arm: Arm) -> None:
    arm()
    assert os.statvfs(view).f_blocks == 1000


ACTIONS: dict[str, Action] = {
    "lookup_nowait": do_lookup,
    "lookup": do_lookup,
    "getattr_nowait": do_getattr,
    "getattr": do_getattr,
    "readlink": do_readlink,
    "open_nowait": do_open,
    "open": do_open,
    "read_nowait": do_read,
    "read": do_read,
    "lseek": do_lseek,
    "opendir": do_list,
    "readdir_nowait": do_list,
    "readdir": do_list,
    "statfs_nowait": do_statfs,
    "statfs": do_statfs,
}
SUBJECTS: dict[Action, str] = {
    do_lookup: "file",
    do_getattr: "file",
    do_open: "file",
    do_read: "file",
    do_lseek: "file",
    do_list: "dir",
}
"""What the action's call is about, where it is a name that other calls can avoid."""

FAULTS = {
    "EACCES": ("OSError", errno.EACCES, errno.EACCES),
    "ETIMEDOUT": ("OSError", errno.ETIMEDOUT, errno.ETIMEDOUT),
    "EIO": ("OSError", errno.EIO, errno.EIO),
    "StaleFile": ("StaleFile", 0, errno.ESTALE),
    "RuntimeError": ("RuntimeError", 0, errno.EIO),
    "KeyError": ("KeyError", 0, errno.EIO),
    "AssertionError": ("AssertionError", 0, errno.EIO),
}
"""What is raised -> its name for the runner, its errno, and the errno that the reader must get."""

fresh = itertools.count()


def is_offered(front: Served, method: str) -> bool:
    """Whether the front end has this call at all: pyfuse3 has no LSEEK."""
    return not (front.front_end == "pyfuse3" and method == "lseek")


def prepare(front: Served, method: str) -> None:
    """Make the asynchronous twin be called, and give readlink a link that the kernel has not read yet."""
    if f"{method}_nowait" in ACTIONS or method == "statfs":
        front.do("decline", method=f"{method}_nowait")
    if method == "readlink":
        for link in front.view.glob("fresh-link*"):
            front.do("remove", path=link.name)
        front.do("add_symlink", path=f"fresh-link{next(fresh)}", target="target")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("method", ACTIONS)
def test_every_exception_becomes_an_errno_and_the_mount_lives_on(front: Served, method: str, fault: str) -> None:
    if not is_offered(front, method):
        return
    exception, number, expected = FAULTS[fault]
    act = ACTIONS[method]
    prepare(front, method)
    before = front.state()["surprises"]
    with pytest.raises(OSError, match=os.strerror(expected)):
        act(front.view, lambda: front.do("rule", method=method, exception=exception, number=number))
    assert (front.state()["surprises"] > before) == (fault in ("RuntimeError", "KeyError", "AssertionError"))
    front.do("reset")
    act(front.view, lambda: None)


SILENT = {
    "release": "file",
    "forget": "file",
    "releasedir": "many",
    "known_entry": "00003-xxx",  # in the middle of a reply, when references have been counted already
    "advise_attributes": "many",
}


@pytest.mark.parametrize("method", SILENT)
def test_a_surprise_where_no_reader_waits_for_an_answer_is_counted(front: Served, method: str) -> None:
    if method == "forget" and os.geteuid() != 0:
        pytest.skip("only root can drop the kernel's dentries")
    before = front.state()["surprises"]
    front.do("rule", method=method, exception="RuntimeError", subject=SILENT[method])

    def is_counted() -> bool:
        if method == "release":
            do_open(front.view, lambda: None)
        elif method == "forget":
            do_lookup(front.view, lambda: None)
            drop_dentries()
        else:
            front.do("ttl", seconds=60)
            drop_pages(front.view / "many")
            with suppress(OSError), os.scandir(front.view / "many") as entries:  # may fail: nothing is said of that
                for entry in entries:
                    entry.stat()  # makes the kernel go on asking for attributes
            front.do("ttl", seconds=0)
        return bool(front.state()["surprises"] > before)

    wait_until(is_counted, 10, f"the exception of {method} is counted")
    front.do("reset")
    do_list(front.view, lambda: None)
    do_read(front.view, lambda: None)


def test_a_surprise_is_logged_once_and_counted_each_time(front: Served) -> None:
    front.do("rule", method="lookup_nowait", exception="ValueError")
    before = front.state()
    tracebacks = front.log().count("Traceback")
    for name in ("one", "two", "three"):
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            os.stat(front.view / name)
    after = front.state()
    assert after["surprises"] == before["surprises"] + 3
    (entry,) = [e for e in after["errors"] if "ValueError" in e["message"]]
    assert entry["count"] == 3
    assert front.log().count("Traceback") == tracebacks + 1


# Waiting


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """Readers that may get stuck; the watchdog of `front` frees them."""
    with ThreadPoolExecutor(20) as pool:
        yield pool


def act_until_held(front: Served, method: str, threads: ThreadPoolExecutor) -> "Future[None]":
    """Start the method's action in a thread and return when the method waits in the fake."""
    act = ACTIONS[method]
    prepare(front, method)

    armed: Future[None] = Future()

    def arm() -> None:
        front.do("rule", method=method, waits=True, subject=SUBJECTS.get(act))
        armed.set_result(None)

    acting = threads.submit(act, front.view, arm)
    armed.result(10)
    wait_until(lambda: any(held[0] == method for held in front.state()["held"]), 10, f"{method} is held")
    return acting


@pytest.mark.parametrize("method", [name for name in ACTIONS if not name.endswith("_nowait") and name != "opendir"])
def test_a_call_that_waits_does_not_block_others(front: Served, threads: ThreadPoolExecutor, method: str) -> None:
    if not is_offered(front, method):
        return
    waiting = act_until_held(front, method, threads)
    assert os.stat(front.view / "other").st_size == 5000
    drop_pages(front.view / "other")
    assert (front.view / "other").read_bytes() == content(2, 0, 5000)
    drop_pages(front.view / "many")
    assert len(os.listdir(front.view / "many")) == LIST_LENGTH
    assert not waiting.done()
    front.do("reset")
    waiting.result(10)


def test_readers_of_many_files_wait_at_once(front: Served, threads: ThreadPoolExecutor) -> None:
    """Hung reads must not keep others out: the kernel's own limit of readahead requests under way is 12."""
    names = [f"hung{number}" for number in range(20)]
    for name in names:
        front.do("add_file", path=name, text=name * 2000)
    front.do("decline", method="read_nowait")
    front.do("rule", method="read", waits=True)
    readers = [threads.submit((front.view / name).read_bytes) for name in names]
    wait_until(lambda: len(front.state()["held"]) == len(names), 10, "all reads are held")
    front.do("reset")
    assert [reader.result(10) for reader in readers] == [name.encode() * 2000 for name in names]


READER = """
import os, signal, sys
signal.signal(signal.SIGUSR1, lambda *_: None)
try:
    {call}
except OSError as exc:
    print(exc.errno)
else:
    print(0)
"""


def start_reader(call: str, path: Path) -> "subprocess.Popen[str]":
    """A process that makes one call on sys.argv[1] and prints the errno it got, or 0."""
    return subprocess.Popen([sys.executable, "-c", READER.format(call=call), path], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    ("method", "name", "call"),
    [
        ("lookup", "file", "os.stat(sys.argv[1])"),
        ("readdir", "dir", "os.listdir(sys.argv[1])"),
        ("statfs", "/", "os.statvfs(sys.argv[1])"),
    ],
)
def test_a_signal_ends_a_waiting_call_with_eintr(front: Served, method: str, name: str, call: str) -> None:
    """pyfuse3 cannot: the call goes on until its answer comes (a deviation)."""
    drop_pages(front.view / "dir")
    front.do("decline", method=f"{method}_nowait")
    front.do("rule", method=method, waits=True, subject=name)
    with start_reader(call, front.view / name.strip("/")) as reader:
        front.wait_held(method, name)
        reader.send_signal(signal.SIGUSR1)
        if front.front_end == "pyfuse3":
            os.stat(front.view / "other")  # answered after INTERRUPT was read
            assert [method, name] in front.state()["held"]
            assert reader.poll() is None
            front.do("reset")
        expected = 0 if front.front_end == "pyfuse3" else errno.EINTR
        assert reader.communicate(timeout=10)[0].strip() == str(expected)
    wait_until(lambda: front.state()["held"] == [], 10, f"{method} has ended")


def test_a_killed_reader_ends_while_its_read_waits(front: Served) -> None:
    drop_pages(front.view / "file")
    front.do("decline", method="read_nowait")
    front.do("rule", method="read", waits=True, subject="file")
    with start_reader("open(sys.argv[1], 'rb').read(10)", front.view / "file") as reader:
        front.wait_held("read", "file")
        reader.kill()
        reader.wait(10)
    front.do("reset")
    do_read(front.view, lambda: None)


# Types


def test_attributes_arrive_unchanged(front: Served) -> None:
    for name, nanoseconds in TIMES.items():
        st = os.stat(front.view / name)
        assert (st.st_mtime_ns, st.st_atime_ns, st.st_ctime_ns) == (nanoseconds,) * 3
    st = os.stat(front.view / "odd")
    assert (st.st_blocks, st.st_blksize, st.st_nlink, st.st_size) == (77, 65536, 3, 5)
    assert st.st_ino == (1 << 63) + 5
    numbers = os.statvfs(front.view)
    assert (numbers.f_bsize, numbers.f_frsize, numbers.f_bfree, numbers.f_files) == (65536, 4096, 500, 300)
    assert numbers.f_namemax == 255
    assert numbers.f_flag & os.ST_RDONLY


def test_a_read_gives_no_byte_beyond_what_operations_delivered(front: Served) -> None:
    fd = os.open(front.view / "other", os.O_RDONLY)
    try:
        assert os.pread(fd, 100_000, 4990) == content(2, 4990, 10)
        assert os.pread(fd, 4096, 5000) == b""
    finally:
        os.close(fd)


@pytest.mark.parametrize("declined", [[], ["known_entry"], ["readdir_nowait", "known_entry", "lookup_nowait"]])
def test_a_listing_has_every_name_once_with_the_number_and_type_of_stat(front: Served, declined: list[str]) -> None:
    for method in declined:
        front.do("decline", method=method)
    listed = raw_listing(front.view / "many")
    names = [entry.name for entry in listed]
    assert names[:2] == [b".", b".."]
    assert len(names) == len(set(names)) == LIST_LENGTH + 2
    for entry in listed[2:]:
        st = os.lstat(os.fsencode(front.view / "many") + b"/" + entry.name)
        assert (entry.ino, entry.type) == (st.st_ino, st.st_mode >> 12)


def test_a_name_whose_look_up_fails_is_listed_all_the_same(front: Served) -> None:
    front.do("decline", method="known_entry")
    front.do("rule", method="lookup_nowait", exception="OSError", number=errno.EACCES, subject="1")
    drop_pages(front.view / "dir")
    listed = {entry.name: entry.type for entry in raw_listing(front.view / "dir")}
    assert listed == {b".": 4, b"..": 4, b"0": 8, b"1": 8, b"2": 8}
    with pytest.raises(PermissionError):
        os.stat(front.view / "dir" / "1")
    front.do("reset")
    assert os.stat(front.view / "dir" / "1").st_size == 1


def test_a_listing_looks_no_name_up_unless_it_must(front: Served) -> None:
    """pyfuse3 forces attributes into every listing (a deviation); else they are given where they are known."""
    front.do("decline", method="known_entry")
    drop_pages(front.view / "many")
    before = front.state()["calls"].get("lookup_nowait", 0)
    os.listdir(front.view / "many")
    look_ups = front.state()["calls"].get("lookup_nowait", 0) - before
    if front.front_end == "pyfuse3":
        assert look_ups >= LIST_LENGTH
    else:
        assert look_ups <= 1  # of the directory itself


def test_a_new_version_is_another_inode_and_the_old_one_keeps_its_bytes(front: Served) -> None:
    """The source's inode number is kept, but pyfuse3 shows another one while the old version is known (a deviation)."""
    name = f"versions-{next(fresh)}"
    front.do("add_file", path=name, text="old bytes")
    ino = os.stat(front.view / name).st_ino
    with (front.view / name).open("rb", buffering=0) as old:
        front.do("add_file", path=name, text="new bytes!")
        assert (front.view / name).read_bytes() == b"new bytes!"
        assert old.read() == b"old bytes"
        shown = os.stat(front.view / name).st_ino
        (listed,) = [entry.ino for entry in raw_listing(front.view) if entry.name == name.encode()]
    assert listed == shown
    if front.front_end == "pyfuse3":
        assert shown >= SUBSTITUTES
    else:
        assert shown == ino


def test_the_numbers_of_directories(front: Served) -> None:
    """pyfuse3 shows 1 for the root, and in listings the source's number for `..` (a deviation)."""
    root = os.stat(front.view).st_ino
    listed = {entry.name: entry.ino for entry in raw_listing(front.view / "dir")}
    assert listed[b"."] == os.stat(front.view / "dir").st_ino
    assert root == (1 if front.front_end == "pyfuse3" else listed[b".."])


def test_holes_are_known_to_the_kernel_front_end_only(front: Served) -> None:
    """pyfuse3 has no LSEEK, so every file looks dense (a deviation)."""
    fd = os.open(front.view / "file", os.O_RDONLY)
    try:
        hole = os.lseek(fd, 0, os.SEEK_HOLE)
        with pytest.raises(OSError, match=os.strerror(errno.ENXIO)):
            os.lseek(fd, FILE_SIZE, os.SEEK_DATA)
    finally:
        os.close(fd)
    assert hole == (FILE_SIZE if front.front_end == "pyfuse3" else FILE_SIZE // 2)


def test_the_mount_table_names_source_and_type(front: Served) -> None:
    """libfuse takes ASCII only (a deviation): other characters are shown by their numbers."""
    found = mounting.find_mount(str(front.view))
    assert found is not None
    name = FSNAME.encode("ascii", "backslashreplace").decode() if front.front_end == "pyfuse3" else FSNAME
    assert (found.fs_type, found.source) == ("fuse.dmfs", name)


def test_writing_is_refused(front: Served) -> None:
    attempts: list[Callable[[], object]] = [
        lambda: os.open(front.view / "file", os.O_RDWR),
        lambda: os.mkdir(front.view / "new"),
        lambda: os.unlink(front.view / "file"),
        lambda: os.rename(front.view / "file", front.view / "new"),
        lambda: os.truncate(front.view / "file", 1),
        lambda: os.utime(front.view / "file"),
        lambda: os.setxattr(front.view / "file", "user.x", b"1"),
    ]
    for attempt in attempts:
        with pytest.raises(OSError, match=os.strerror(errno.EROFS)):
            attempt()
    with pytest.raises(OSError, match=os.strerror(errno.EOPNOTSUPP)):
        os.getxattr(front.view / "file", "user.x")


# The account. These come last: they see what all the tests above have left behind.


def drop_dentries() -> None:
    """Make the kernel forget the inodes that nobody uses."""
    Path("/proc/sys/vm/drop_caches").write_text("2")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can drop the kernel's dentries")
def test_look_ups_and_forgets_balance(front: Served) -> None:
    for folder, _, names in os.walk(front.view):
        for name in names:
            os.lstat(os.path.join(folder, name))
    assert len(front.state()["references"]) >= LIST_LENGTH

    def all_forgotten() -> bool:
        drop_dentries()
        return not front.state()["references"]

    wait_until(all_forgotten, 10, "the kernel has given all references back")
    do_read(front.view, lambda: None)


def test_every_open_has_its_release(front: Served) -> None:
    def open_handles() -> tuple[int, int]:
        state = front.state()
        return state["handles"], state["directory_handles"]

    wait_until(lambda: open_handles() == (0, 0), 10, "all handles have been released")


def test_unmounting_ends_the_session_and_gives_everything_back(served: Served) -> None:
    os.stat(served.view / "file")
    with served.watched(TEST_TIMEOUT):
        state: dict[str, Any] = served.unmount()
    assert (state["handles"], state["directory_handles"], state["misuse"]) == (0, 0, [])
    if served.front_end == "pyfuse3":
        assert state["references"] == {}


# The pyfuse3 front end mounts by itself


def test_a_pyfuse3_mount_that_fails_says_why(tmp_path: Path) -> None:
    pytest.importorskip("pyfuse3", reason="pyfuse3 is not installed")
    served = Served("pyfuse3", mountpoint=tmp_path / "missing")
    try:
        assert served.error is not None
        assert f"{tmp_path}/missing" in served.error
        assert os.strerror(errno.ENOENT) in served.error
    finally:
        served.close()


@pytest.mark.slow
def test_closing_a_pyfuse3_session_unmounts_whatever_is_under_way(threads: ThreadPoolExecutor) -> None:
    pytest.importorskip("pyfuse3", reason="pyfuse3 is not installed")
    served = Served("pyfuse3")
    try:
        with served.watched(TEST_TIMEOUT):
            fd = os.open(served.view / "file", os.O_RDONLY)  # a plain unmount would say EBUSY
            waiting = act_until_held(served, "lookup", threads)
            served.do("stop")
            state = served.wait_end()
            assert (state["references"], state["held"]) == ({}, [])
            with pytest.raises(OSError, match=f"{os.strerror(errno.ENOTCONN)}|{os.strerror(errno.ECONNABORTED)}"):
                waiting.result(10)
            assert not is_mounted(served.view)
            with suppress(OSError):  # ENOTCONN, as close(2) says what FLUSH said
                os.close(fd)
    finally:
        served.close()


def test_without_pyfuse3_the_session_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = ImportError("libfuse3.so.3: cannot open shared object file")
    monkeypatch.setattr(portable, "_import_failure", reason)
    with pytest.raises(FuseUnavailable, match=r"libfuse3\.so\.3.*dmfs\[pyfuse3\]"):
        portable.PortableSession(cast("Operations", FakeOperations()), mountpoint="/m", fsname="f", allow_other=False)


def test_the_module_imports_without_pyfuse3() -> None:
    code = "import sys; sys.modules['pyfuse3'] = None; from dmfs.fuse.portable import PortableSession"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, cwd=REPOSITORY, timeout=30)


def test_the_fake_has_the_interface_of_operations() -> None:
    names = [name for name, _ in inspect.getmembers(FakeOperations, inspect.isfunction) if not name.startswith("_")]
    shared = [name for name in names if not name.startswith(("add_", "remove", "let_go", "reset"))]
    for name in shared:
        real, fake = getattr(Operations, name), getattr(FakeOperations, name)
        assert list(inspect.signature(real).parameters) == list(inspect.signature(fake).parameters), name
        assert inspect.iscoroutinefunction(real) == inspect.iscoroutinefunction(fake), name
