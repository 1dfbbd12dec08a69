#!/usr/bin/env python3
"""The command line of slowfs, a slow file system over a directory: options, background, mounting, signals.

The file system itself is scripts/lib/slowfs_server.py.
"""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import click

if __name__ == "__main__":  # so that it runs from anywhere, without being installed
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from dmfs.errors import MountpointError, UserError
from dmfs.fuse import mounting
from scripts.lib.slowfs_server import SlowFileSystem

FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)


@click.command()
@click.argument("source", type=FOLDER)
@click.argument("mountpoint", type=FOLDER)
@click.option("--latency", default=0.0, metavar="MS", help="Milliseconds that each operation takes.")
@click.option("--bandwidth", default=0.0, metavar="MB/s", help="10^6 bytes a second, for all readers together.")
@click.option("--age", default=0.0, metavar="SECONDS", help="Show files this much older than they are.")
@click.option(
    "--attr-timeout",
    default=1.0,
    show_default=True,
    metavar="SECONDS",
    help="How long the kernel may trust attributes.",
)
@click.option("--control", type=click.Path(path_type=Path), help="A Unix socket to ask for counters and change limits.")
@click.option("-f", "--foreground", is_flag=True, help="Stay in the foreground; print one line when the mount answers.")
@click.pass_obj
def main(
    kind: type[SlowFileSystem] | None,
    source: Path,
    mountpoint: Path,
    latency: float,
    bandwidth: float,
    age: float,
    attr_timeout: float,
    control: Path | None,
    foreground: bool,
) -> None:
    """Show the directory SOURCE, read-only and slow, at MOUNTPOINT, and count what is asked of it.

    It stands for a busy parallel file system such as Lustre. Nothing is kept in the page cache of this mount, so every
    read is a read here (a memory mapping keeps its pages).

    \b
    A millisecond per operation and 200 MB/s for all, on files that look ten days old:
        scripts/slowfs.py --latency 1 --bandwidth 200 --age 864000 /data/imagenet /mnt/slow
    What has been asked so far:
        getfattr --only-values -n user.slowfs.stats /mnt/slow
    The end:
        umount /mnt/slow          (or, not as root, fusermount3 -u /mnt/slow)

    \b
    With --control /tmp/slow.sock, one JSON object a connection, answered with one:
        echo '{"op": "stats"}' | nc -NU /tmp/slow.sock
        {"op": "set", "latency_ms": 5, "bandwidth": 50}     bandwidth 0 is without limit
        {"op": "reset"}                                     all counters to 0
    """
    if not foreground:
        sys.exit(_start_in_background())
    file_system = (kind or SlowFileSystem)(  # a test double hands in its own
        str(source), latency=latency / 1e3, bandwidth=bandwidth * 1e6, age=age, attr_timeout=attr_timeout
    )
    try:
        serve(file_system, source=source, mountpoint=mountpoint, control=control)
    except UserError as exc:
        print(exc, file=sys.stderr)
        sys.exit(exc.exit_code)


def serve(file_system: SlowFileSystem, *, source: Path, mountpoint: Path, control: Path | None) -> None:
    """Mount and serve until unmounted, or until SIGTERM or SIGINT; prints one line when the mount answers.

    Raises:
        UserError: it cannot be mounted.
    """
    source, mountpoint = source.resolve(), mountpoint.resolve()
    if source == mountpoint or mountpoint in source.parents or source in mountpoint.parents:
        raise MountpointError(f"{source} and {mountpoint} lie in each other: slowfs would wait for itself")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(_stop_descriptor())
        listener = stack.enter_context(_listener(control)) if control else None
        # Root's mount is for all, as a parallel file system is.
        is_root = os.geteuid() == 0
        device = mounting.mount(str(mountpoint), fsname=f"slowfs:{source}", allow_other=is_root, subtype="slowfs")
        try:
            file_system.run(
                device, control=listener, stop=stop, on_ready=lambda: print(f"{source} on {mountpoint}", flush=True)
            )
        finally:
            # In this order: nobody can wait any more for this process while it unmounts.
            os.close(device)
            _detach(str(mountpoint))


def _detach(mountpoint: str) -> None:
    found = mounting.find_mount(mountpoint)
    if found is not None and found.fs_type == "fuse.slowfs":
        with contextlib.suppress(OSError):
            mounting.unmount(mountpoint, lazy=True)


@contextlib.contextmanager
def _stop_descriptor() -> Iterator[int]:
    """A descriptor that becomes readable with SIGTERM or SIGINT."""
    reader, writer = os.pipe()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: os.write(writer, b"!"))
    yield reader
    os.close(reader)
    os.close(writer)


@contextlib.contextmanager
def _listener(path: Path) -> Iterator[socket.socket]:
    """A Unix socket for the caller's user alone, removed at the end."""
    path.unlink(missing_ok=True)
    mask = os.umask(0o177)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            os.umask(mask)
            listener.listen()
            yield listener
    finally:
        os.umask(mask)
        path.unlink(missing_ok=True)


def _start_in_background() -> int:
    """Run the same command with -f in a process of its own; returns when the mount answers, or its exit code."""
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, __file__, "--foreground", *sys.argv[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            start_new_session=True,
        )
        assert process.stdout is not None
        if process.stdout.readline():
            return 0
        code = process.wait()
        errors.seek(0)
        sys.stderr.buffer.write(errors.read())
        return code or 1


if __name__ == "__main__":
    main()
