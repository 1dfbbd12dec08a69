"""POSIX checks: names, paths, symbolic links, and how directories are listed."""

import errno
import glob
import json
import os
import stat
import subprocess
import sys
import tarfile

from tests.mount.posix.target import Registry, Target, raises_errno
from tests.mount.posix.tree import LINKS, MANY, ODD_NAMES
from tests.support.files import RawEntry, getdents, iter_chunks, raw_listing

names = Registry()

DT_UNKNOWN = 0


@names.add
def odd_names_are_listed_and_opened(target: Target) -> None:
    folder = os.fsencode(target.view / "names")
    assert sorted(os.listdir(folder)) == sorted(ODD_NAMES)
    for number, name in enumerate(ODD_NAMES):
        fd = os.open(folder + b"/" + name, os.O_RDONLY)
        try:
            assert os.read(fd, 100) == b"content %d" % number, f"{name!r} has another file's content"
        finally:
            os.close(fd)


@names.add
def too_long_names(target: Target) -> None:
    folder = os.fsencode(target.view / "nested")
    with raises_errno(errno.ENOENT):
        os.stat(folder + b"/" + b"n" * 255)
    for length in (256, 257, 1023, 1024, 1025, 4000):
        with raises_errno(errno.ENAMETOOLONG):
            os.stat(folder + b"/" + b"n" * length)
    with raises_errno(errno.ENAMETOOLONG):
        os.open(folder + b"/" + b"n" * 256, os.O_RDONLY)
    with raises_errno(errno.ENAMETOOLONG):
        os.stat(folder + b"/." * 3000)


@names.add
def files_are_not_folders(target: Target) -> None:
    for path in ("plain/", "plain/x", "plain/.", "plain/..", "plain/x/y"):
        with raises_errno(errno.ENOTDIR):
            os.stat(f"{target.view}/{path}")
    with raises_errno(errno.ENOENT):
        os.stat(f"{target.view}/missing/x")
    assert os.stat(f"{target.view}/nested/") == os.stat(f"{target.view}/nested")


@names.add
def dots_in_paths(target: Target) -> None:
    wanted = os.stat(target.view / "nested/a/file")
    assert os.stat(f"{target.view}/nested/./a/../a/b/../file") == wanted
    assert os.path.realpath(f"{target.view}/nested/a/b/..") == f"{target.view}/nested/a"
    outside = os.stat(f"{target.view}/..")
    assert outside.st_ino == os.stat(target.view.parent).st_ino


@names.add
def links_hold_their_bytes(target: Target) -> None:
    folder = os.fsencode(target.view / "links")
    links = LINKS | {b"absolute": os.fsencode(target.source / "plain")}
    assert sorted(os.listdir(folder)) == sorted(links)
    for name, held in links.items():
        st = os.lstat(folder + b"/" + name)
        assert stat.S_ISLNK(st.st_mode), f"{name!r} is no link"
        assert st.st_size == len(held), f"{name!r}: st_size {st.st_size}, not {len(held)}"
        for _ in range(2):
            assert os.readlink(folder + b"/" + name) == held


@names.add
def links_are_followed(target: Target) -> None:
    links = target.view / "links"
    dense = os.stat(target.view / "sizes/131073.bin")
    assert os.stat(links / "relative") == dense
    assert os.stat(links / "chain") == dense
    assert os.listdir(links / "to-directory") == os.listdir(target.view / "nested")
    assert (links / "to-directory/a/file").read_bytes() == b"file"
    assert os.stat(links / "absolute") == os.stat(target.source / "plain"), "an absolute link leads into the source"
    assert os.stat(links / "out-of-tree") == os.stat("/etc/hostname")
    for code, name in [(errno.ENOENT, "dangling"), (errno.ELOOP, "loop"), (errno.ENOENT, "odd-bytes")]:
        with raises_errno(code):
            os.stat(links / name)
    with raises_errno(errno.ENAMETOOLONG, errno.ENOENT):
        os.stat(links / "long")
    followed = [folder for folder, _, _ in os.walk(links, followlinks=True)]
    assert f"{links}/to-directory/a/b/c/d/e" in followed


@names.add
def hard_links_are_one_file(target: Target) -> None:
    one, two = target.view / "hard/first/one", target.view / "hard/second/two"
    for path in (one, two, one):
        st = path.stat()
        assert (st.st_nlink, st.st_ino) == (2, (target.source / "hard/first/one").stat().st_ino)
    assert one.read_bytes() == two.read_bytes()
    assert (target.view / "hard/first/single").stat().st_nlink == 1


@names.add
def archive_has_one_copy_and_one_link(target: Target) -> None:
    archive = target.scratch / "hard.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(target.view / "hard", "hard")
    with tarfile.open(archive) as tar:
        kinds = sorted((m.name, m.islnk(), m.size) for m in tar.getmembers() if not m.isdir())
    linked = [name for name, is_link, _ in kinds if is_link]
    assert len(linked) == 1, f"{len(linked)} links in the archive: {kinds}"
    assert sum(size for _, _, size in kinds) == 20_000, f"the archive holds a file twice: {kinds}"


@names.add
def many_entries_agree_with_stat(target: Target) -> None:
    folder = target.view / "many"
    entries = [e for e in raw_listing(folder) if e.name not in (b".", b"..")]
    assert len({e.name for e in entries}) == len(entries) == MANY
    base = os.open(folder, os.O_RDONLY)
    try:
        for entry in entries:
            st = os.stat(entry.name, dir_fd=base, follow_symlinks=False)
            assert entry.ino == st.st_ino != 0, f"{entry.name!r}: listed as inode {entry.ino}, stat says {st.st_ino}"
            assert entry.type in (DT_UNKNOWN, stat.S_IFMT(st.st_mode) >> 12), f"{entry.name!r}: type {entry.type}"
    finally:
        os.close(base)
    wanted = {e.name: (e.ino, e.type) for e in raw_listing(target.source / "many") if e.name not in (b".", b"..")}
    assert {e.name: e.ino for e in entries} == {name: ino for name, (ino, _) in wanted.items()}


@names.add
def special_entries_have_their_type(target: Target) -> None:
    for folder in ("special", "links", "nested", "modes"):
        for entry in raw_listing(target.view / folder):
            if entry.name == b"..":
                continue
            st = os.lstat(os.fsencode(target.view / folder) + b"/" + entry.name)
            assert entry.type in (DT_UNKNOWN, stat.S_IFMT(st.st_mode) >> 12), f"{entry.name!r}: type {entry.type}"
            assert entry.ino == st.st_ino, f"{entry.name!r}: inode {entry.ino}, stat says {st.st_ino}"


@names.add
def dot_and_dotdot_are_listed_once(target: Target) -> None:
    for folder in ("empty", "nested/a", "many"):
        entries = raw_listing(target.view / folder)
        dots = {e.name: e for e in entries if e.name in (b".", b"..")}
        assert sum(e.name in (b".", b"..") for e in entries) == 2, f"{folder}: . and .. are not there once each"
        assert dots[b"."].ino == os.stat(target.view / folder).st_ino, f"{folder}: inode number of ."
        assert all(e.type in (DT_UNKNOWN, 4) for e in dots.values()), f"{folder}: . or .. is no directory"
    assert len(raw_listing(target.view / "empty")) == 2
    assert os.listdir(target.view / "empty") == []


@names.add
def listing_by_small_requests(target: Target) -> None:
    whole = sorted(e.name for e in raw_listing(target.view / "names"))
    assert sorted(e.name for e in raw_listing(target.view / "names", size=300)) == whole
    assert sorted(e.name for e in raw_listing(target.view / "names", size=1024)) == whole


@names.add
def listing_goes_on_from_any_entry(target: Target) -> None:
    fd = os.open(target.view / "many", os.O_RDONLY | os.O_DIRECTORY)
    try:
        entries: list[RawEntry] = [entry for chunk in iter_chunks(fd) for entry in chunk]
        assert len(entries) == MANY + 2
        for position in (0, 1, 2, 777, 5_000, 12_345, MANY - 1, MANY + 1):
            os.lseek(fd, entries[position].cookie, os.SEEK_SET)
            following = [e.name for e in getdents(fd)]
            wanted = [e.name for e in entries[position + 1 : position + 1 + len(following)]]
            assert following == wanted, f"after seeking behind entry {position} the listing is another"
            assert following or position == MANY + 1, f"nothing follows entry {position}"
        os.lseek(fd, 0, os.SEEK_SET)
        assert [e.name for chunk in iter_chunks(fd) for e in chunk] == [e.name for e in entries], "after rewinding"
    finally:
        os.close(fd)


@names.add
def two_listers_do_not_disturb_each_other(target: Target) -> None:
    first = os.open(target.view / "many", os.O_RDONLY | os.O_DIRECTORY)
    second = os.open(target.view / "many", os.O_RDONLY | os.O_DIRECTORY)
    try:
        seen: list[set[bytes]] = [set(), set()]
        open_ends = {0: first, 1: second}
        while open_ends:
            for lister, fd in list(open_ends.items()):
                entries = getdents(fd, 1024 * (lister + 1))
                seen[lister].update(e.name for e in entries)
                if not entries:
                    del open_ends[lister]
        assert len(seen[0]) == len(seen[1]) == MANY + 2
    finally:
        os.close(first)
        os.close(second)


@names.add
def same_names_as_the_source(target: Target) -> None:
    def walk(root: str) -> list[tuple[str, list[str], list[str]]]:
        return sorted(
            (os.path.relpath(folder, root), sorted(folders), sorted(files))
            for folder, folders, files in os.walk(root)
            if not folder.startswith(f"{root}/mutable")
        )

    assert walk(str(target.view)) == walk(str(target.source))
    found = glob.glob(f"{glob.escape(str(target.view))}/nested/**/leaf", recursive=True)
    assert found == [f"{target.view}/nested/a/b/c/d/e/leaf"]


@names.add
def relative_to_open_directories(target: Target) -> None:
    base = os.open(target.view / "nested", os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert os.fstat(base) == os.stat(target.view / "nested")
        fd = os.open("a/file", os.O_RDONLY, dir_fd=base)
        try:
            assert os.read(fd, 10) == b"file"
        finally:
            os.close(fd)
        assert os.stat("..", dir_fd=base).st_ino == os.stat(target.view).st_ino
        assert os.listdir(base) == ["a"]
    finally:
        os.close(base)


@names.add
def working_directory(target: Target) -> None:
    folder = target.view / "nested/a/b"
    done = subprocess.run(["/bin/pwd", "-P"], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stdout == f"{folder}\n"


INTERRUPTED_LISTER = """
import json, os, signal, sys
ticks = 0
def tick(*_):
    global ticks
    ticks += 1
signal.signal(signal.SIGALRM, tick)
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
counts = [set() for _ in sys.argv[1:]]
while ticks < 40:
    for seen, folder in zip(counts, sys.argv[1:]):
        seen.add(len(os.listdir(folder)))
signal.setitimer(signal.ITIMER_REAL, 0)
print(json.dumps([list(seen) for seen in counts]))
"""


@names.add
def listing_under_a_storm_of_signals(target: Target) -> None:
    command = [sys.executable, "-c", INTERRUPTED_LISTER, str(target.view / "names"), str(target.view / "many")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[len(ODD_NAMES)], [MANY]], "a listing under signals lost or doubled entries"
