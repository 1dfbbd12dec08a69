"""Fixtures of the fault tests: sources that misbehave.

Among a test's arguments they stand before `dmfs_mount`, so that they outlive the mount.
"""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.doubles.badsrc import BadSource
from tests.support.mounts import MountFactory, why_no_mounts
from tests.support.ordered_daemon import OrderedMount

OLD = 864_000  # seconds: files that look ten days old are not looked at a second time before they are published


@pytest.fixture
def bad_source(tmp_path: Path) -> Iterator[Callable[..., BadSource]]:
    """A function that puts a badsrc before a folder: `bad_source(folder, **options of BadSource)`."""
    if reason := why_no_mounts():
        pytest.skip(reason)
    with contextlib.ExitStack() as stack:

        def start(folder: Path, **options: float) -> BadSource:
            mountpoint = tmp_path / f"{folder.name}-bad"
            return stack.enter_context(BadSource(folder, mountpoint, **{"age": OLD, **options}))

        yield start


@pytest.fixture
def ordered_mount(dmfs_mount: MountFactory) -> Callable[..., OrderedMount]:
    """A function that mounts as `dmfs_mount` does, with a daemon that gives up copies when it is told to."""
    return partial(dmfs_mount, kind=OrderedMount)  # type: ignore[arg-type]


NOBODY = 65534


@pytest.fixture
def user_folder(open_fuse_device: None) -> Iterator[Path]:
    """A folder of an ordinary user, who may open /dev/fuse meanwhile."""
    if os.geteuid() != 0:
        pytest.skip("becoming another user needs root")
    folder = Path(tempfile.mkdtemp(prefix="dm-", dir="/tmp"))
    os.chown(folder, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)
