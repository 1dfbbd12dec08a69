"""Storm: many processes that read a folder of self-describing files in every way there is, and check every byte.

The files are those of tests/support/files.py's `make_files` (`00042.bin` is file 42). Run as a program
(`python -m tests.doubles.storm FOLDER ...`) or through `run`. Each reader is a forked process with a random order of
its own; some get a signal every millisecond, as profilers and progress bars send them. The readers start together. What
is wrong is reported, not raised: one JSON object, see `Report`. Exit code 1 if any byte was wrong or a reader died.
"""

import argparse
import contextlib
import errno
import json
import mmap
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.support.files import BLOCK, KiB, MiB, explain, version_of

ALIGNMENT = 4 * KiB
LARGEST_READ = 1 * MiB  # bytes: one FUSE message at most, so both sizes below and at the limit occur
EXAMPLES_KEPT = 5  # wrong reads described in full; the rest is only counted


@dataclass
class Report:
    """What one reader, or all of them together, did.

    Attributes:
        reads: system calls (or touches of a mapping) made, by kind.
        bytes: checked.
        wrong: number of reads with wrong bytes or a wrong length; `examples` describes the first ones.
        errors: failed calls by errno name. Whether they are allowed is for the caller to say.
        signals: received by the readers.
        died: readers that ended by a signal or without a report.
        versions: highest version that an open showed; looked at only if any version may be read.
    """

    reads: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    wrong: int = 0
    examples: list[str] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    signals: int = 0
    died: int = 0
    versions: int = 0

    def add(self, other: "Report") -> None:
        """Take in another reader's report."""
        self.reads = dict(Counter(self.reads) + Counter(other.reads))
        self.errors = dict(Counter(self.errors) + Counter(other.errors))
        self.bytes += other.bytes
        self.wrong += other.wrong
        self.examples = (self.examples + other.examples)[:EXAMPLES_KEPT]
        self.signals += other.signals
        self.died += other.died
        self.versions = max(self.versions, other.versions)

    @property
    def total_reads(self) -> int:
        """Reads of all kinds."""
        return sum(self.reads.values())


Reading = Callable[[int, int, int], bytes]
"""(fd, offset, length) -> the bytes read; fewer than `length` only at the end of the file."""


def _pread(fd: int, offset: int, length: int) -> bytes:
    return os.pread(fd, length, offset)


def _seek_and_read(fd: int, offset: int, length: int) -> bytes:
    os.lseek(fd, offset, os.SEEK_SET)
    return os.read(fd, length)


def _mapped(fd: int, offset: int, length: int) -> bytes:
    start = offset - offset % mmap.ALLOCATIONGRANULARITY
    length = min(length, os.fstat(fd).st_size - offset)
    with mmap.mmap(fd, offset - start + length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ, offset=start) as view:
        return view[offset - start :]


def _vectored(fd: int, offset: int, length: int) -> bytes:
    first = bytearray(min(length, 777))
    buffers = [first, bytearray(length - len(first))]
    count = os.preadv(fd, buffers, offset)
    return b"".join(buffers)[:count]


def _direct(fd: int, offset: int, length: int) -> bytes:
    aligned = offset - offset % ALIGNMENT
    room = -(-(offset + length - aligned) // ALIGNMENT) * ALIGNMENT
    with mmap.mmap(-1, room) as buffer:
        count, more = 0, ALIGNMENT
        while more and count < room and count % ALIGNMENT == 0:  # a signal may end a direct read early
            more = os.preadv(fd, [memoryview(buffer)[count:]], aligned + count)
            count += more
        return buffer[offset - aligned : min(count, offset + length - aligned)]


KINDS: dict[str, Reading] = {
    "pread": _pread,
    "seek": _seek_and_read,
    "mmap": _mapped,
    "readv": _vectored,
    "direct": _direct,
}


class Reader:
    """One reader: picks files, offsets and lengths at random and checks what it gets.

    Where any version may be read (`version` is None), all that one open shows must be of one version, and never of an
    older one than this reader has seen.
    """

    def __init__(self, paths: Sequence[Path], kinds: Sequence[str], version: int | None, seed: int) -> None:
        self.report = Report(reads=dict.fromkeys(kinds, 0))
        self._paths = paths
        self._kinds = kinds
        self._version = version
        self._seen: dict[int, int] = {}  # by file number, where any version may be read
        self._random = random.Random(seed)

    def session(self) -> None:
        """Open one file in one way, read it some times, close it."""
        kind = self._random.choice(self._kinds)
        path = self._random.choice(self._paths)
        number = int(path.stem)
        try:
            fd = os.open(path, os.O_RDONLY | (os.O_DIRECT if kind == "direct" else 0))
            try:
                size = os.fstat(fd).st_size
                version = self._find_version(kind, fd, number) if self._version is None and size else self._version
                for _ in range(self._random.randint(1, 8)):
                    self._read_once(kind, fd, number, size, version or 0)
            finally:
                os.close(fd)
        except OSError as exc:
            name = errno.errorcode.get(exc.errno or 0, str(exc))
            self.report.errors[name] = self.report.errors.get(name, 0) + 1

    def _find_version(self, kind: str, fd: int, number: int) -> int:
        version = version_of(KINDS[kind](fd, 0, BLOCK))
        if version < self._seen.get(number, 0):
            self._is_wrong(f"{kind}: file {number}: version {version} after version {self._seen[number]}")
        self._seen[number] = version
        self.report.versions = max(self.report.versions, version)
        return version

    def _is_wrong(self, example: str) -> None:
        self.report.wrong += 1
        if len(self.report.examples) < EXAMPLES_KEPT:
            self.report.examples.append(example)

    def _read_once(self, kind: str, fd: int, number: int, size: int, version: int) -> None:
        if size == 0:
            return
        offset = self._random.randrange(size)
        length = self._random.choice([1, 100, 4 * KiB, 60_000, 128 * KiB, LARGEST_READ])
        data = KINDS[kind](fd, offset, length)
        wanted = min(length, size - offset)
        if len(data) < wanted:
            # An error half-way makes a read short, natively too, and the next one tells it.
            os.pread(fd, wanted - len(data), offset + len(data))
        problem = f"file {number}: {len(data)} bytes at {offset}, not {wanted}"
        if len(data) == wanted:
            problem = explain(data, number, offset, version) or ""
        self.report.reads[kind] += 1
        self.report.bytes += len(data)
        if problem:
            self._is_wrong(f"{kind}: {problem}")


def _read_in_child(reader: Reader, go: int, *, reads: int, deadline: float, interrupted: bool) -> None:
    """The life of a forked reader: wait for the start, then read to the end of its time or count."""
    os.read(go, 1)  # ends for all at once, when the parent closes the other end

    if interrupted:

        def count_signal(*_: object) -> None:
            reader.report.signals += 1

        signal.signal(signal.SIGALRM, count_signal)
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    while reader.report.total_reads < reads and time.monotonic() < deadline:
        reader.session()
    signal.setitimer(signal.ITIMER_REAL, 0)


def storm(
    folder: Path,
    *,
    processes: int,
    reads: int,
    seconds: float,
    kinds: Sequence[str],
    signals: int,
    version: int | None,
    seed: int,
) -> Report:
    """Fork the readers, start them together, and add up what they report.

    Args:
        reads: of each reader; `seconds` ends it earlier.
        signals: how many of the readers get a signal every millisecond.
    """
    paths = sorted(folder.rglob("*.bin"))
    if not paths:
        raise SystemExit(f"no *.bin files in {folder}")
    go, start = os.pipe()
    deadline = time.monotonic() + seconds
    children: dict[int, int] = {}
    for index in range(processes):
        answers, answer = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            with contextlib.suppress(BrokenPipeError):
                os.close(start)
                reader = Reader(paths, kinds, version, seed * 1000 + index)
                _read_in_child(reader, go, reads=reads, deadline=deadline, interrupted=index < signals)
                with open(answer, "w") as stream:
                    json.dump(asdict(reader.report), stream)
                code = 0
            os._exit(code)
        os.close(answer)
        children[pid] = answers
    os.close(go)
    os.close(start)
    total = Report()
    for pid, answers in children.items():
        with open(answers) as stream:
            text = stream.read()
        _, status = os.waitpid(pid, 0)
        if status or not text:
            total.died += 1
        else:
            total.add(Report(**json.loads(text)))
    return total


def run(folder: Path, *, timeout: float = 60.0, **options: Any) -> Report:
    """Run a storm in a process of its own (a test's may have threads, so it must not fork) and wait for its report.

    Args:
        options: the command line's, as `processes=8, reads=200, kinds="pread,mmap"`.
    """
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "tests.doubles.storm", str(folder), *arguments]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=timeout)
    if not done.stdout:
        raise RuntimeError(f"the storm ended without a report: {done.stderr}")
    return Report(**json.loads(done.stdout))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--processes", type=int, default=8)
    parser.add_argument("--reads", type=int, default=200, help="of each process")
    parser.add_argument("--seconds", type=float, default=30, help="at most")
    parser.add_argument("--kinds", default=",".join(KINDS), help="a comma-separated choice of %(default)s")
    parser.add_argument("--signals", type=int, default=2, help="processes that get one every millisecond")
    parser.add_argument("--version", default="0", help="of the files' content; any: whichever an open shows")
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args())
    options["kinds"] = options["kinds"].split(",")
    options["version"] = None if options["version"] == "any" else int(options["version"])
    if unknown := set(options["kinds"]) - set(KINDS):
        parser.error(f"unknown kinds: {', '.join(sorted(unknown))}")
    report = storm(options.pop("folder"), **options)
    print(json.dumps(asdict(report)))
    sys.exit(1 if report.wrong or report.died else 0)


if __name__ == "__main__":
    main()
