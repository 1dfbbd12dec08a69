"""POSIX checks: what stat, statvfs and extended attributes say, and that reading changes none of it."""

import errno
import os
import shutil
import stat
import subprocess
from collections.abc import Iterator

from tests.mount.posix.target import Registry, Target, raises_errno
from tests.mount.posix.tree import TIMES_NS, XATTR
from tests.support.files import drop_pages

attributes = Registry()

FIELDS = [
    "st_mode",
    "st_ino",
    "st_nlink",
    "st_uid",
    "st_gid",
    "st_rdev",
    "st_size",
    "st_blocks",
    "st_blksize",
    "st_atime_ns",
    "st_mtime_ns",
    "st_ctime_ns",
]
"""All of a stat result but st_dev, which is each mount's own."""


def _fields(path: bytes) -> dict[str, int]:
    st = os.lstat(path)
    return {field: getattr(st, field) for field in FIELDS}


def _rich_part(root: bytes) -> Iterator[bytes]:
    """Relative paths of all entries, but for `mutable` and the 20,000 that are compared elsewhere."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name not in (b"mutable", b"many")]
        for name in folders + files:
            yield os.path.relpath(folder + b"/" + name, root)


@attributes.add
def every_field_equals_the_source(target: Target) -> None:
    view, source = os.fsencode(target.view), os.fsencode(target.source)
    count = 0
    for path in _rich_part(source):
        seen, wanted = _fields(view + b"/" + path), _fields(source + b"/" + path)
        different = {name: (seen[name], wanted[name]) for name in FIELDS if seen[name] != wanted[name]}
        assert not different, f"{path!r}: (seen, at the source) {different}"
        count += 1
    assert count > 500


@attributes.add
def fields_of_the_root(target: Target) -> None:
    assert _fields(os.fsencode(target.view)) == _fields(os.fsencode(target.source))


def fields_of_the_root_but_its_number(target: Target) -> None:
    """libfuse gives the root the inode number 1."""
    seen, wanted = _fields(os.fsencode(target.view)), _fields(os.fsencode(target.source))
    assert seen.pop("st_ino") == 1
    del wanted["st_ino"]
    assert seen == wanted


@attributes.add
def odd_times_are_exact(target: Target) -> None:
    for name, nanoseconds in TIMES_NS.items():
        path = target.view / "times" / name
        assert path.stat().st_mtime_ns == nanoseconds, name
        assert path.read_bytes() == b"dated"
        with path.open("rb") as file:
            assert os.fstat(file.fileno()).st_mtime_ns == nanoseconds, name
    done = subprocess.run(["stat", "-c", "%Y", target.view / "times/minus-1.5s"], capture_output=True, text=True)
    assert done.stdout == "-2\n", f"{done}"


@attributes.add
def reading_changes_no_times(target: Target) -> None:
    place = f"{target.mutable}/quiet/times"
    view, source = target.view / place, target.source / place
    before = source.stat()
    folder_before = source.parent.stat()
    seen = view.stat()
    assert (seen.st_mtime_ns, seen.st_ctime_ns) == (before.st_mtime_ns, before.st_ctime_ns)
    for _ in range(2):
        view.read_bytes()
        os.listdir(view.parent)
        drop_pages(view)
    for now, what in ((view.stat(), "view"), (source.stat(), "source")):
        assert now.st_mtime_ns == before.st_mtime_ns, f"reading changed the mtime at the {what}"
        assert now.st_ctime_ns == before.st_ctime_ns, f"reading changed the ctime at the {what}"
    folder_now, folder_seen = source.parent.stat(), view.parent.stat()
    assert folder_now.st_mtime_ns == folder_seen.st_mtime_ns == folder_before.st_mtime_ns
    assert folder_now.st_ctime_ns == folder_seen.st_ctime_ns == folder_before.st_ctime_ns
    assert view.stat() == view.stat(), "attributes differ from call to call"


@attributes.add
def file_system_figures(target: Target) -> None:
    seen, wanted = os.statvfs(target.view), os.statvfs(target.source)
    assert seen.f_flag & os.ST_RDONLY, "statvfs does not say read-only"
    for field in ("f_frsize", "f_blocks", "f_files", "f_namemax"):
        assert getattr(seen, field) == getattr(wanted, field), field
    assert seen.f_namemax == 255
    assert 0 < seen.f_bavail <= seen.f_bfree < seen.f_blocks
    below = os.statvfs(target.view / "nested/a/file")
    assert (below.f_blocks, below.f_frsize) == (seen.f_blocks, seen.f_frsize)
    assert shutil.disk_usage(target.view).total == shutil.disk_usage(target.source).total
    done = subprocess.run(["df", "-P", target.view], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1].split()[5] == str(target.view), done.stdout


def _getxattr(path: object, name: str) -> bytes | int:
    try:
        return os.getxattr(str(path), name, follow_symlinks=False)
    except OSError as exc:
        return exc.errno or 0


@attributes.add
def extended_attributes(target: Target) -> None:
    for name in (XATTR[0], "user.missing", "security.capability", "system.posix_acl_access"):
        seen, wanted = _getxattr(target.view / "xattr", name), _getxattr(target.source / "xattr", name)
        assert seen == wanted, f"{name}: {seen!r}, at the source {wanted!r}"
    assert os.listxattr(target.view / "xattr") == os.listxattr(target.source / "xattr")


def extended_attributes_are_not_offered(target: Target) -> None:
    """ENOSYS once; callers see EOPNOTSUPP, which ls, cp and tar take for "none"."""
    for path in ("xattr", "plain", "nested"):
        for name in (XATTR[0], "user.missing"):
            assert _getxattr(target.view / path, name) == errno.EOPNOTSUPP, f"{path}: {name}"
        acl = _getxattr(target.view / path, "system.posix_acl_access")
        assert acl in (errno.EOPNOTSUPP, errno.ENODATA), f"{path}: the kernel's own answer for ACLs is {acl}"
        with raises_errno(errno.EOPNOTSUPP):
            os.listxattr(target.view / path)
    done = subprocess.run(["ls", "-l", target.view / "hard/first"], capture_output=True, text=True, check=True)
    assert not done.stderr


@attributes.add
def modes_of_directories(target: Target) -> None:
    for mode in (0o1777, 0o2775, 0o555):
        st = os.stat(f"{target.view}/modes/folder-{mode:04o}")
        assert stat.S_IMODE(st.st_mode) == mode
