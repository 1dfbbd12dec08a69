"""Files made ready before they are asked for: copies in a tier and, pushed, their bytes in the kernel's page cache.

The work behind `dmfs warm`. Which files, and in which order, is the caller's choice; it has looked them up through the
mount, as only then the kernel knows the nodes that bytes can be pushed to.
"""

import os

import trio

from dmfs import memory
from dmfs.errors import ConfigError, StaleFile, TierUnavailable
from dmfs.fuse.kernel import KernelSession
from dmfs.fuse.operations import Operations
from dmfs.metrics import Pushes, WarmProgress
from dmfs.types import DataFile

AT_ONCE = 16  # files under way in one run: as many as there are places for pieces
SHARE_OF_MEMORY = 2  # a run may push into one part in so many of the memory that is available
MAX_NAMED = 32  # failures that are named; all are counted


class Warmer:
    """Makes files of one mount ready."""

    def __init__(self, operations: Operations, session: KernelSession | None, pushes: Pushes) -> None:
        """`session` is None for a front end that cannot push."""
        self._operations = operations
        self._manager = operations.manager
        self._session = session
        self._pushes = pushes

    async def warm(self, paths: list[bytes], push: bool, pushed_bytes: int, progress: WarmProgress) -> None:
        """Have these files in a tier, and push them if that is asked for.

        Args:
            paths: relative to the source.
            pushed_bytes: what the run that this is a part of has pushed already.
            progress: where to count.

        Raises:
            ConfigError: this mount cannot push.
        """
        if push:
            self._check_can_push()
        room = memory.available() // SHARE_OF_MEMORY - pushed_bytes if push else 0
        places = trio.Semaphore(AT_ONCE)
        async with trio.open_nursery() as nursery:
            for path in paths:
                await places.acquire()
                nursery.start_soon(self._warm_one, path, places, push, room, progress)

    def _check_can_push(self) -> None:
        if self._session is None:
            raise ConfigError(
                "the front end pyfuse3 cannot push: warm without --push, or mount with --front-end kernel"
            )
        if self._session.passthrough is not None:
            raise ConfigError(
                "nothing can be pushed here: this mount's --io is passthrough, where the kernel reads the copies "
                "themselves; warm without --push, or mount with --io pagecache"
            )

    async def _warm_one(
        self, path: bytes, places: trio.Semaphore, push: bool, room: int, progress: WarmProgress
    ) -> None:
        try:
            node, file = await self._operations.find_file(path)
            size = file.version.size
            was_here = self._manager.has_copy(file.key)
            if not await self._manager.fetch(file):
                progress.no_room += 1
                return
            progress.files += 1
            progress.bytes += size
            if not was_here and size:
                progress.fetched += 1
                progress.fetched_bytes += size
            if push and size:
                await self._push(node, file, room, progress)
        except (OSError, StaleFile) as exc:
            self._fail(path, exc, progress)
        finally:
            places.release()

    @staticmethod
    def _fail(path: bytes, exc: OSError | StaleFile, progress: WarmProgress) -> None:
        progress.failures += 1
        if len(progress.failed) < MAX_NAMED:
            reason = exc.strerror or repr(exc) if isinstance(exc, OSError) else "changed at the source meanwhile"
            progress.failed.append((os.fsdecode(path), reason))

    async def _push(self, node: int, file: DataFile, room: int, progress: WarmProgress) -> None:
        assert self._session is not None
        size = file.version.size
        if progress.pushed_bytes + size > room:
            progress.no_memory += 1
            return
        if not self._manager.hold_copy(file):
            return
        # Counted before it is done, so that those under way at the same time see how much is left.
        progress.pushed_bytes += size
        is_pushed = False
        try:
            copy = await self._manager.open_copy(file)
            if copy is not None and node:
                is_pushed = await self._session.notifier.push(node, copy.descriptor, size)
                self._manager.pages_pushed(copy, size)
        except TierUnavailable:
            pass  # logged by the manager
        finally:
            self._manager.close(file)
            if is_pushed:
                progress.pushed += 1
                self._pushes.files += 1
                self._pushes.bytes += size
            else:
                progress.pushed_bytes -= size
