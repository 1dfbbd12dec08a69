"""The process behind a mount: builds every object, owns every nursery, and ends in order.

Started by `dmfs mount` as a process of its own (never by a fork of one that has threads), or run in the foreground.
The order of the end: unmounted, late publications done, fills dropped, locks released.
"""

import argparse
import contextlib
import faulthandler
import gc
import json
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import trio

from dmfs import __version__, control, disks, privileges, runtime
from dmfs.config import CacheConfig, MountConfig
from dmfs.errors import SourceError, UserError
from dmfs.fuse import mounting
from dmfs.fuse.io_mode import IoMode
from dmfs.fuse.kernel import KernelSession
from dmfs.fuse.operations import Operations
from dmfs.fuse.passthrough import Probe
from dmfs.fuse.portable import PortableSession
from dmfs.fuse.ttl import MetadataTtl
from dmfs.fuse.warming import Warmer
from dmfs.log import ErrorLog, setup
from dmfs.metrics import Metrics
from dmfs.tiers.folder import open_folder
from dmfs.tiers.manager import Manager
from dmfs.tiers.nowait import can_read_nowait
from dmfs.tiers.source import Source
from dmfs.tiers.store import ReadMode, Store
from dmfs.types import Clock, KiB

logger = logging.getLogger("dmfs")

SOURCE_ANSWER_LIMIT = 30.0  # seconds a mount waits for the source's first answer
SWITCH_INTERVAL = 0.0005  # seconds a thread may keep the interpreter from the event loop; Python's own is 0.005
_LIBRARY_IO = IoMode("plain", "the only one of this front end; each range that is not in the page cache is a message")
MAX_WAITING = 32  # calls to the source that `dmfs status` names


class Daemon:
    """One mount.

    Attributes:
        config: what was asked for.
        state: "starting", "mounted", "detaching" (unmounted lazily, still in use) or "unmounting".
    """

    def __init__(self, config: MountConfig) -> None:
        self.config = config
        self.state = "starting"
        self._clock = Clock()
        self._started = self._clock.monotonic()
        self._fsname = f"dmfs:{config.source}"
        self._device: int | None = None  # the connection to the kernel, until the session has it
        self._has_mounted = False
        self._metrics = Metrics()
        self._errors = ErrorLog()
        self._user = privileges.account_of(os.geteuid(), os.getegid()).name
        self._dataset_id = config.dataset_id or config.source
        self._source = _open_source(config, self._metrics, self._clock)
        self._stores = [self._open_store(cache) for cache in config.cache]
        self._manager = Manager(
            self._source,
            self._stores,
            metrics=self._metrics,
            errors=self._errors,
            clock=self._clock,
            is_immutable=config.immutable,
            open_wait=config.open_wait,
            open_wait_seconds=config.open_wait_seconds,
            pieces_in_flight=config.pieces_in_flight,
            fills=config.fills,
            threads=config.data_threads,
        )
        # Made before the tiers are scanned, which removes what it finds under way.
        self._probes = [Probe(store.path, store.make_probe()) for store in self._stores]
        self._operations: Operations | None = None
        self._kernel: KernelSession | None = None
        self._session = trio.CancelScope()
        self._is_forced = False

    def _open_store(self, cache: CacheConfig) -> Store:
        folder = open_folder(cache.path, source=self.config.source, dataset_id=self._dataset_id)
        room = disks.room(cache.path)
        read_mode: ReadMode = "memory"
        if disks.file_system(cache.path).kind != "memory":
            read_mode = "nowait" if can_read_nowait(folder.tmp_fd) else "thread"
        return Store(
            folder,
            capacity=cache.size.resolve(room.total) if cache.size else room.total,
            min_free=self.config.min_free.resolve(room.total),
            read_mode=read_mode,
            clock=self._clock,
        )

    async def run(self, control_socket: str, on_ready: Callable[[], None]) -> None:
        """Mount, call `on_ready` once the mount answers, and serve until it is unmounted."""
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals, self._mounted():
            async with trio.open_nursery() as services:
                await services.start(self._manager.run)
                services.start_soon(self._stop_on_signal, signals)
                with self._session:
                    try:
                        self._operations = await self._build_operations(services)
                        await self._serve(self._operations, services, control_socket, on_ready)
                    finally:
                        self._unmount()
                self.state = "unmounting"
                if not self._is_forced:
                    await self._manager.drain()
                services.cancel_scope.cancel()
        self._manager.shut_down()

    @contextlib.contextmanager
    def _mounted(self) -> Iterator[None]:
        """Mount, for the front end that does not do so itself; nothing is mounted after the block.

        It comes before anything that starts a thread, which would keep what only mounting needs of root's power.
        """
        config = self.config
        if config.front_end == "kernel":
            self._device = mounting.mount(
                config.mountpoint,
                fsname=self._fsname,
                allow_other=config.allow_other,
                readahead_kib=config.readahead // KiB,
            )
            self._has_mounted = True
        try:
            if config.user is not None:
                privileges.settle()
            yield
        finally:
            self._unmount()

    def _unmount(self) -> None:
        """Once: what is mounted there afterwards may be somebody else's."""
        if not self._has_mounted:
            return
        self._has_mounted = False
        if self._device is not None:
            os.close(self._device)
            self._device = None
        with contextlib.suppress(OSError, UserError):
            if self._is_in_mount_table():
                mounting.unmount(self.config.mountpoint, lazy=True)

    async def _build_operations(self, services: trio.Nursery) -> Operations:
        config = self.config
        try:
            with trio.fail_after(SOURCE_ANSWER_LIMIT):
                root = await self._source.lstat(b"")
        except OSError as exc:
            raise SourceError(f"cannot read the source {config.source}: {exc.strerror}; check the path") from exc
        except trio.TooSlowError as exc:
            raise SourceError(
                f"the source {config.source} did not answer within {SOURCE_ANSWER_LIMIT:.0f} s; "
                "mount again when its file system is well"
            ) from exc
        return Operations(
            self._manager,
            root,
            nursery=services,
            metrics=self._metrics,
            errors=self._errors,
            clock=self._clock,
            ttl=MetadataTtl(self._clock, fixed=config.metadata_ttl, is_immutable=config.immutable),
            dataset_id=os.fsencode(self._dataset_id),
            version_from=config.version_from,
        )

    async def _serve(
        self, operations: Operations, services: trio.Nursery, control_socket: str, on_ready: Callable[[], None]
    ) -> None:
        """Serve until unmounted or stopped."""
        config = self.config
        session: KernelSession | PortableSession
        if self._device is None:
            self._has_mounted = True
            session = PortableSession(
                operations, mountpoint=config.mountpoint, fsname=self._fsname, allow_other=config.allow_other
            )
        else:
            session = self._kernel = KernelSession(
                self._device, operations, io=config.io, probes=self._probes, readahead=config.readahead
            )
            self._device, self._probes = None, []
        async with trio.open_nursery() as nursery:
            await nursery.start(session.run)
            if config.front_end == "pyfuse3":  # libfuse has mounted only now
                mounting.set_readahead(config.mountpoint, config.readahead // KiB)
            # Not before the mount answers: who can ask for the status can use the mount.
            await services.start(
                partial(
                    control.serve,
                    control_socket,
                    status=self.status,
                    stop=self._stop,
                    warm=Warmer(operations, self._kernel, self._metrics.pushes).warm,
                    surprised=operations.surprised,
                )
            )
            self.state = "mounted"
            logger.info("%s is mounted at %s", config.source, config.mountpoint)
            on_ready()

    async def _stop_on_signal(self, signals: Any) -> None:
        async for number in signals:
            logger.info("%s: unmounting", signal.Signals(number).name)
            self._stop(False)

    def _stop(self, force: bool) -> None:
        """End the session: the mount is detached at once, and whoever still has files open gets ENOTCONN.

        Args:
            force: do not wait for late publications.
        """
        self._is_forced = self._is_forced or force
        self._session.cancel()

    def _is_in_mount_table(self) -> bool:
        mount = mounting.find_mount(self.config.mountpoint)
        return mount is not None and mount.fs_type == "fuse.dmfs"

    def status(self) -> dict[str, Any]:
        """The answer to `dmfs status --json`, see docs/configuration.md."""
        state = self.state
        if state == "mounted" and not self._is_in_mount_table():
            state = "detaching"
        metrics = self._metrics
        io_mode = (self._kernel and self._kernel.io_mode) or _LIBRARY_IO
        passthrough = self._kernel and self._kernel.passthrough
        calls = sorted(self._source.metadata.waiting() + self._source.data.waiting(), key=lambda call: -call[1])
        return {
            "mountpoint": self.config.mountpoint,
            "source": {"path": self.config.source, **metrics.source.as_dict()},
            "dataset_id": self._dataset_id,
            "state": state,
            "front_end": self.config.front_end,
            "io_mode": io_mode.name,
            "io_mode_reason": io_mode.reason,
            "version": __version__,
            "pid": os.getpid(),
            "user": self._user,
            "uptime_s": round(self._clock.monotonic() - self._started, 3),
            "tiers": [store.statistics() for store in self._stores],
            "served": {
                "local": metrics.local.as_dict(),
                "peer": metrics.peer.as_dict(),
                "source": metrics.source_served.as_dict(),
                "kernel": metrics.kernel.as_dict(),
            },
            "pushes": metrics.pushes.as_dict(),
            "fills": self._manager.statistics(),
            "known": {
                **(self._operations.statistics() if self._operations else {}),
                **(passthrough.statistics() if passthrough else {"backing_ids": 0, "backing_ids_idle": 0}),
            },
            "waiting": [{"path": os.fsdecode(path), "age_s": round(age, 3)} for path, age in calls[:MAX_WAITING]],
            "stale_served": metrics.stale_served,
            "surprises": metrics.surprises,
            "errors": self._errors.entries(),
        }


def _open_source(config: MountConfig, metrics: Metrics, clock: Clock) -> Source:
    try:
        return Source(
            config.source,
            metrics=metrics,
            clock=clock,
            metadata_threads=config.metadata_threads,
            data_threads=config.data_threads,
            version_from=config.version_from,
        )
    except OSError as exc:
        raise SourceError(f"cannot open the source {config.source}: {exc.strerror}; check the path") from exc


def run(config: MountConfig, *, on_ready: Callable[[], None] | None = None) -> None:
    """Mount and serve in this process until unmounted.

    Args:
        on_ready: called once, when the mount answers.

    Raises:
        UserError: it cannot be mounted; nothing is left behind.
    """
    setup(log_file=config.log_file, verbose=config.verbose)
    sys.setswitchinterval(SWITCH_INTERVAL)
    gc.freeze()  # what was imported is here to stay, and need not be walked over again and again
    _raise_open_files()
    record = runtime.MountRecord(config.mountpoint, config.source, os.getpid(), time.time())
    lock = runtime.acquire(config.mountpoint, record)
    try:
        daemon = Daemon(config)
        trio.run(daemon.run, lock.socket, on_ready or _nothing)
    except BaseException as exc:
        user_error = _user_error_in(exc)
        if user_error is not None and user_error is not exc:
            raise user_error from exc
        raise
    finally:
        lock.release()
    logger.info("%s is unmounted", config.mountpoint)


def _nothing() -> None:
    pass


def _raise_open_files() -> None:
    """As many descriptors as this process may have: opens and copies each take one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _user_error_in(exc: BaseException) -> UserError | None:
    """The user's mistake inside an exception or a group of them, if there is one."""
    if isinstance(exc, UserError):
        return exc
    for inner in getattr(exc, "exceptions", ()):
        found = _user_error_in(inner)
        if found is not None:
            return found
    return None


def main() -> None:
    """Entry of the background process: settings come through one pipe, the outcome leaves through another."""
    parser = argparse.ArgumentParser(prog="dmfs.daemon")
    parser.add_argument("--config-fd", type=int, required=True)
    parser.add_argument("--ready-fd", type=int, required=True)
    arguments = parser.parse_args()
    faulthandler.enable()
    with open(arguments.config_fd, "rb") as stream:
        config = MountConfig.model_validate_json(stream.read())
    ready = open(arguments.ready_fd, "w")  # noqa: SIM115 (closed by the first thing that is said)
    os.set_inheritable(arguments.ready_fd, False)

    def tell(answer: dict[str, object]) -> None:
        if not ready.closed:
            with contextlib.suppress(BrokenPipeError), ready:
                ready.write(json.dumps(answer) + "\n")

    def say_ready() -> None:
        tell({"ok": True})
        os.chdir("/")  # or the directory it was started in could not be unmounted
        if config.log_file is None:
            # Until now standard error was a file without a name, for the command to read; it would only grow.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, 1)
            os.dup2(null, 2)
            os.close(null)

    try:
        if config.user is not None:
            privileges.become(privileges.find_account(config.user))
        run(config, on_ready=say_ready)
    except UserError as exc:
        logger.error("%s", exc)
        tell({"error": str(exc), "exit_code": exc.exit_code})
        sys.exit(exc.exit_code)
    except Exception as exc:
        logger.critical("the daemon failed", exc_info=exc)
        tell({"error": f"the daemon failed: {exc!r}; the log has more", "exit_code": 1})
        sys.exit(1)


if __name__ == "__main__":
    main()
