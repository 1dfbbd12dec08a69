"""Fixtures of the tests with real mounts."""

import os
import stat
from collections.abc import Iterator

import pytest


@pytest.fixture
def open_fuse_device() -> Iterator[None]:
    """Lets everybody open /dev/fuse, as distributions do."""
    mode = stat.S_IMODE(os.stat("/dev/fuse").st_mode)
    os.chmod("/dev/fuse", 0o666)
    yield
    os.chmod("/dev/fuse", mode)
