"""Signals to a reader that waits for the source: only one that ends the process ends its call, as on a local disk."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.files import KiB, make_files
from tests.support.mounts import WAYS, MountFactory
from tests.support.waiting import wait_until

SIZES = [4 * KiB, 4 * KiB, 4 * KiB]

UNDER_SIGNALS = """
import ctypes, json, os, signal, sys
view = sys.argv[1]
ticks = 0
def tick(*_):
    global ticks
    ticks += 1
signal.signal(signal.SIGALRM, tick)
libc = ctypes.CDLL(None, use_errno=True)  # Python itself repeats an interrupted open or read, other programs do not
failed = []
def call(name, *arguments):
    result = getattr(libc, name)(*arguments)
    if result < 0:
        failed.append([name, os.strerror(ctypes.get_errno())])
    return result
signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
call("access", f"{view}/00000.bin".encode(), os.F_OK)
fd = call("open", f"{view}/00001.bin".encode(), os.O_RDONLY)
buffer = ctypes.create_string_buffer(4096)
got = call("read", fd, buffer, 4096)
folder = call("open", view.encode(), os.O_RDONLY | os.O_DIRECTORY)
call("getdents64", folder, buffer, 4096)
signal.setitimer(signal.ITIMER_REAL, 0)
print(json.dumps({"ticks": ticks, "failed": failed, "read": got}))
"""


@pytest.mark.parametrize("way", WAYS)
def test_handled_signals_do_not_end_a_call(
    tmp_path: Path, bad_source: Callable, dmfs_mount: MountFactory, way: str
) -> None:
    make_files(tmp_path / "set", SIZES)
    source = bad_source(tmp_path / "set")
    source.rule(delay=0.05)
    mount = dmfs_mount(source.mountpoint, way=way)
    done = subprocess.run([sys.executable, "-c", UNDER_SIGNALS, mount.view], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["failed"] == [], "a native file system finishes these calls before it delivers a handled signal"
    assert report["read"] == 4 * KiB
    assert report["ticks"] >= 3, f"hardly a signal came: {report}"


STAT = [sys.executable, "-c", "import os, sys; os.stat(sys.argv[1])"]
LIST = [sys.executable, "-c", "import os, sys; os.listdir(os.path.dirname(sys.argv[1]))"]
READ = ["cat"]
DIRECT = ["dd", "iflag=direct", "bs=4096", "of=/dev/null"]


@pytest.mark.parametrize(
    ("operation", "command"), [("LOOKUP", STAT), ("OPENDIR", LIST), ("READ", READ), ("OPEN", READ), ("READ", DIRECT)]
)
def test_killed_process_ends_at_once(
    tmp_path: Path, bad_source: Callable, dmfs_mount: MountFactory, operation: str, command: list[str]
) -> None:
    """With the kernel front end; libfuse's answer comes only when the source's does (docs/semantics.md)."""
    make_files(tmp_path / "set", SIZES)
    source = bad_source(tmp_path / "set", attr_timeout=0)
    mount = dmfs_mount(source.mountpoint)
    source.rule(operation, hangs=True)
    argument = f"if={mount.view}/00000.bin" if command is DIRECT else f"{mount.view}/00000.bin"
    process = subprocess.Popen([*command, argument], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait_until(lambda: source.hanging(), 10, f"the {operation} hangs")
    process.kill()
    try:
        process.wait(2)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"a process killed while its {operation} hangs did not end") from None
    finally:
        source.clear()
    assert sorted(os.listdir(mount.view)) == ["00000.bin", "00001.bin", "00002.bin"]
