"""Something that is under way and that several tasks wait for: a piece, an opening, a look-up. No I/O."""

import trio

from dmfs.errors import without_traceback


class Pending:
    """One outcome for all who wait.

    Attributes:
        done: set by `finish`.
        error: why it did not come to pass, if it did not.
    """

    __slots__ = ("done", "error")

    def __init__(self) -> None:
        self.done = trio.Event()
        self.error: Exception | None = None

    async def wait(self) -> None:
        """Wait until it is finished. Raises its error, a new one for each caller."""
        await self.done.wait()
        if self.error is not None:
            raise without_traceback(self.error)

    def fail(self, error: Exception) -> None:
        """It failed with `error`, which is kept without its traceback. `finish` must follow."""
        self.error = without_traceback(error)

    def finish(self) -> None:
        """It is over: whoever waits goes on."""
        self.done.set()
