"""Starts the daemon of a mount in the background, as a fresh process, and waits until its mount answers.

A fresh process and not a fork: whatever has threads, sockets or an event loop is made on the side where it is used.
"""

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from typing import IO

import dmfs
from dmfs import privileges
from dmfs.config import MountConfig
from dmfs.errors import ConfigError, DaemonUnresponsive, UserError
from dmfs.fuse import mounting
from dmfs.log import open_private

START_TIMEOUT = 60.0  # seconds until the mount answers, which takes one where the source answers
_END_TIMEOUT = 5.0  # seconds that a daemon we give up on has to clear up
_MAX_WORDS = 4096  # bytes looked at of what a dead daemon said
_PART = 65536  # bytes


def start(config: MountConfig, environ: Mapping[str, str]) -> int:
    """Start the daemon and return its pid once it has said that it is ready.

    Args:
        environ: for the daemon. Where root mounts for a user it must be root's still: the daemon starts as root, and
            would run what that user's PYTHONPATH or home directory has in store for Python.

    Raises:
        UserError: what the daemon said instead, or that it died.
        DaemonUnresponsive: it said nothing in time.
        KeyboardInterrupt: the user did not want to wait. As after every failure, the daemon has been ended.
    """
    with _open_output(config.log_file) as output:
        begin = output.seek(0, os.SEEK_END)
        process, ready = _spawn(config, environ, output)
        try:
            with open(ready, "rb", buffering=0):
                line = _read_line(ready, process.pid)
            if not line:
                raise UserError(_last_words(process, output, begin))
            _check_answer(json.loads(line))
        except BaseException:
            _end(process, config.mountpoint)
            raise
        return process.pid


def _open_output(log_file: str | None) -> IO[bytes]:
    """Where the daemon's standard output and error go: the log, or a file without a name that is read if it dies."""
    if log_file is None:
        return tempfile.TemporaryFile()
    try:
        return open(log_file, "ab+", opener=open_private)
    except OSError as exc:
        raise ConfigError(f"the log file {log_file} cannot be opened: {exc.strerror}") from exc


def _spawn(config: MountConfig, environ: Mapping[str, str], output: IO[bytes]) -> tuple["subprocess.Popen[bytes]", int]:
    """The daemon's process, its configuration written, and the descriptor on which it will say that it is ready."""
    config_read, config_write = os.pipe()
    ready_read, ready_write = os.pipe()
    root = None if config.user is None else 0  # we have become that user; the daemon does it in its own time
    try:
        with privileges.raised():
            process = subprocess.Popen(
                [sys.executable, "-m", "dmfs.daemon", "--config-fd", str(config_read), "--ready-fd", str(ready_write)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(config_read, ready_write),
                # -m looks for modules here first: not in the user's directory, which may have a select.py.
                cwd=os.path.dirname(os.path.dirname(os.path.abspath(dmfs.__file__))),
                env=environ,
                start_new_session=True,
                user=root,
                group=root,
                extra_groups=None if root is None else [],
            )
    finally:
        os.close(config_read)
        os.close(ready_write)
    with contextlib.suppress(BrokenPipeError), open(config_write, "wb") as file:
        file.write(config.model_dump_json().encode())
    return process, ready_read


def _read_line(ready: int, pid: int) -> bytes:
    """What the daemon says; nothing if it ends without a word."""
    deadline = time.monotonic() + START_TIMEOUT
    poll = select.poll()
    poll.register(ready, select.POLLIN)
    line = b""
    while not line.endswith(b"\n"):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise DaemonUnresponsive(
                f"the daemon (pid {pid}) was not ready within {START_TIMEOUT:.0f} s and was ended: "
                "run with --foreground --verbose to see what it waits for"
            )
        part = os.read(ready, _PART)
        if not part:
            return b""
        line += part
    return line


def _check_answer(answer: dict[str, object]) -> None:
    if answer.get("ok") is True:
        return
    error = UserError(str(answer.get("error")))
    code = answer.get("exit_code")
    error.exit_code = code if isinstance(code, int) else UserError.exit_code
    raise error


def _last_words(process: "subprocess.Popen[bytes]", output: IO[bytes], begin: int) -> str:
    """The sentence for a daemon that died: its last line is the exception if there was one."""
    process.wait(timeout=_END_TIMEOUT)
    end = output.seek(0, os.SEEK_END)
    output.seek(max(begin, end - _MAX_WORDS))
    lines = [line for line in output.read().decode(errors="replace").splitlines() if line.strip()]
    how = f"was killed by signal {-process.returncode}" if process.returncode < 0 else "ended"
    last = f", its last words: {lines[-1].strip()}" if lines else ""
    return f"the daemon {how} before the mount was ready{last}; run with --foreground to see more"


def _end(process: "subprocess.Popen[bytes]", mountpoint: str) -> None:
    """End the daemon, and the mount it may leave behind."""
    for stop in (process.terminate, process.kill):
        with privileges.raised():  # it may be root's still
            stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_END_TIMEOUT)
            break
    if mounting.is_dead(mountpoint):
        with contextlib.suppress(OSError, UserError):
            mounting.unmount(mountpoint, lazy=True)
