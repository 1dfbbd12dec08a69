"""Fixtures of all tests, the `--full` switch, and the daemons' logs shown with a failed test."""

import os
import stat
import tempfile
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.mounts import MountFactory, live_mounts


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--full` adds the tests marked `full`."""
    parser.addoption("--full", action="store_true", help="also run the literal sizes of the field cases (minutes)")


def pytest_configure(config: pytest.Config) -> None:
    """hypothesis draws the same examples in every run, so that a failure is the change's; `--full` looks further."""
    settings.register_profile("steady", derandomize=True, database=None, deadline=None)
    if not config.getoption("--full"):
        settings.load_profile("steady")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave tests marked `full` out unless asked for: deselected, not skipped; a skip means a lack."""
    if config.getoption("--full"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    if left_out:
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the logs of the mounts of the moment to the report of a failure."""
    report = yield
    if report.failed:
        report.sections.extend((f"dmfs log of {mount.view}", mount.log_tail()) for mount in live_mounts)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Abort the mounts shortly before a test's time is up.

    A test that waits in a read of a hanging mount is deaf to signals, so that pytest-timeout could not end it.
    """
    if not {"dmfs_mount", "target", "viewed"} & set(getattr(item, "fixturenames", ())):
        return (yield)
    marker = item.get_closest_marker("timeout")
    limit = float(marker.args[0] if marker else item.config.getini("timeout"))
    timer = threading.Timer(limit * 0.75, lambda: [mount.abort() for mount in live_mounts])
    timer.daemon = True
    timer.start()
    try:
        return (yield)
    finally:
        timer.cancel()
        timer.join()


@pytest.fixture
def dmfs_mount() -> Iterator[MountFactory]:
    """A function that mounts: `dmfs_mount(source, **options of DmfsMount)`."""
    factory = MountFactory()
    yield factory
    factory.close()


@pytest.fixture
def open_fuse_device() -> Iterator[None]:
    """Lets everybody open /dev/fuse, as distributions do."""
    mode = stat.S_IMODE(os.stat("/dev/fuse").st_mode)
    os.chmod("/dev/fuse", 0o666)
    yield
    os.chmod("/dev/fuse", mode)


@pytest.fixture(scope="session")
def disk_path() -> Iterator[Path]:
    """A folder on a disk file system that knows user xattrs and O_DIRECT, if this machine has one; else any."""
    candidates = [tempfile.gettempdir(), "/var/tmp", os.path.expanduser("~")]
    place = next((c for c in candidates if _is_disk(c)), candidates[0])
    with tempfile.TemporaryDirectory(prefix="dmfs-tests-", dir=place, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def _is_disk(folder: str) -> bool:
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            os.setxattr(file.fileno(), "user.dmfs-test", b"1")
            os.close(os.open(file.name, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        return False
    return True
