"""What both ends of the control socket agree on: limits, and names as text. No imports, no I/O.

The requests are described in control.py, which answers them; cli/client.py asks.
"""

MAX_REQUEST = 64 * 1024  # bytes; a batch of files to warm is the only request that is longer than tens of bytes
MAX_BATCH = 256  # files in a request to warm; one that is cancelled or fails loses no more than these
PROGRESS_INTERVAL = 0.2  # seconds between two lines about a batch, which come even if nothing has changed


def path_to_text(path: bytes) -> str:
    """A path as it stands in a request. UTF-8 whatever the locales of the two ends are; other bytes become escapes."""
    return path.decode("utf-8", "surrogateescape")


def path_from_text(text: str) -> bytes:
    """The inverse of `path_to_text`. Raises UnicodeEncodeError for what that never says."""
    return text.encode("utf-8", "surrogateescape")
