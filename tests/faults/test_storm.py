"""Many readers at once over cold and warm files, by every way of reading, with signals: cases A16, A17."""

from pathlib import Path

import pytest

from tests.doubles import storm
from tests.support.files import KiB, MiB, make_files
from tests.support.mounts import WAYS, MountFactory

SIZES = [0, 1, 4095, 5000, 128 * KiB, 300 * KiB + 7, 1 * MiB, 3 * MiB + 1, 9 * MiB, 12 * MiB + 4097]


def assert_clean(report: storm.Report) -> None:
    assert (report.wrong, report.died, report.errors) == (0, 0, {}), report
    assert min(report.reads.values()) > 0, f"a kind was never used: {report.reads}"


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_cold_then_warm(tmp_path: Path, dmfs_mount: MountFactory, way: str) -> None:
    make_files(tmp_path / "set", SIZES)
    mount = dmfs_mount(tmp_path / "set", way=way)
    assert_clean(storm.run(mount.view, processes=8, reads=60, signals=3, seconds=20))
    status = mount.wait_fills_done()
    assert (status["surprises"], status["errors"]) == (0, [])
    assert status["source"]["bytes"] <= sum(SIZES) * 1.5, "the source was read again and again"
    mount.remount()
    assert_clean(storm.run(mount.view, processes=8, reads=60, signals=3, seconds=20, seed=1))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_cache_too_small(tmp_path: Path, dmfs_mount: MountFactory, way: str) -> None:
    make_files(tmp_path / "set", SIZES)
    mount = dmfs_mount(tmp_path / "set", way=way, caches=[f"{tmp_path / 'cache'}:4MiB"])
    assert_clean(storm.run(mount.view, processes=6, reads=50, signals=2, seconds=20))
    assert mount.status()["surprises"] == 0


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_many_cold_starts(tmp_path: Path, dmfs_mount: MountFactory) -> None:
    make_files(tmp_path / "set", SIZES)
    mount = dmfs_mount.prepare(tmp_path / "set")
    for attempt in range(50):
        mount.caches = [str(tmp_path / f"cache-{attempt}")]
        mount.start()
        assert_clean(storm.run(mount.view, processes=32, reads=40, signals=8, seconds=60, seed=attempt))
        mount.umount()


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_large_files(tmp_path: Path, dmfs_mount: MountFactory) -> None:
    make_files(tmp_path / "set", [10 * MiB] * 10 + [100 * MiB] * 10 + [1024 * MiB])
    mount = dmfs_mount(tmp_path / "set")
    for seed in range(2):
        assert_clean(storm.run(mount.view, processes=8, reads=3000, signals=2, seconds=300, seed=seed, timeout=400))
        mount.wait_fills_done(120)
