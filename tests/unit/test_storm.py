"""The storm itself: it must pass over true files, and must notice a wrong byte, a wrong version and a missing file."""

from pathlib import Path

import pytest

from tests.doubles import storm
from tests.support.files import KiB, MiB, make_files

SIZES = [0, 1, 5000, 100 * KiB + 3, 2 * MiB + 1]


@pytest.fixture
def folder(disk_path: Path, request: pytest.FixtureRequest) -> Path:
    folder = disk_path / request.node.name
    make_files(folder, SIZES)
    return folder


def test_every_kind_passes_natively(folder: Path) -> None:
    report = storm.run(folder, processes=4, reads=60, signals=2)
    assert (report.wrong, report.died, report.errors) == (0, 0, {}), report
    assert set(report.reads) == set(storm.KINDS)
    assert min(report.reads.values()) > 0, f"a kind was never used: {report.reads}"
    assert report.total_reads >= 4 * 60
    assert report.bytes > 1 * MiB
    assert report.signals > 0, "no signal came"


@pytest.mark.parametrize("kind", storm.KINDS)
def test_wrong_byte_is_noticed(folder: Path, kind: str) -> None:
    for path in folder.iterdir():
        data = bytearray(path.read_bytes())
        data[::50] = bytes(len(data[::50]))
        path.write_bytes(data)
    report = storm.run(folder, processes=1, reads=30, kinds=kind, signals=0)
    assert report.wrong > 0
    assert "is wrong" in report.examples[0]


def test_other_version_is_named(folder: Path) -> None:
    report = storm.run(folder, processes=1, reads=30, kinds="pread", version=1)
    assert any("of file" in e and "version 0" in e for e in report.examples), report.examples


def test_failed_calls_are_counted(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
        path.symlink_to(path)
    report = storm.run(folder, processes=2, reads=10, seconds=0.3, signals=0)
    assert set(report.errors) == {"ELOOP"}
    assert report.total_reads == 0
