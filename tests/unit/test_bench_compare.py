"""The comparison of scripts/bench: its figures and how they are shown, and contestants that are missing or fail."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from scripts.lib import bench_compare
from scripts.lib.bench_compare_report import AGAIN, FIRST, WIDTH, CompareReport, case_name
from scripts.lib.contestants import Bindfs, NotInstalled
from scripts.lib.mounts import MountFailed, run_command, served
from scripts.lib.readers import PAGE_SIZE, ReaderPool, ReadError

SIZES = bench_compare.FULL
LARGE = SIZES.groups["large"]


def shown(report: CompareReport) -> str:
    """What the report prints in a terminal of 80 columns."""
    output = io.StringIO()
    report.print(Console(file=output, width=WIDTH))
    return output.getvalue()


def line_of(text: str, variant: str) -> str:
    """The first line about a variant, with single spaces."""
    return next(" ".join(line.split()) for line in text.splitlines() if line.startswith(variant))


@pytest.fixture
def report() -> CompareReport:
    """Three rounds of every contestant in every case: native gives 10, 20, 30, the others half of it and less."""
    report = bench_compare.new_report(SIZES)
    for group in SIZES.groups.values():
        for which in (FIRST, AGAIN):
            for number, (variant, make) in enumerate(bench_compare.CONTESTANTS.items()):
                name = make(Path("/source"), Path("/home") / variant).name
                for value, share in zip((10.0, 20.0, 30.0), (0.9, 1.0, 1.1), strict=True):
                    ratio = share / (1 + number) if number else 1.0
                    report.add(case_name(group, which), name, value * ratio, unit="k pages/s", cpu=0.5)
    for variant, make in bench_compare.CONTESTANTS.items():
        report.add_variant(make(Path("/source"), Path("/home") / variant).name, "bindfs 1.2.3")
    return report


def test_every_goal_is_of_something_that_is_measured(report: CompareReport) -> None:
    assert len(report.goals) == len(bench_compare.GOALS)
    for case, variant in report.goals:
        assert report.find(case, variant), (case, variant)


def test_ratios_are_taken_within_a_round_and_the_median_is_held_against_the_goal(report: CompareReport) -> None:
    series = report.find(case_name(LARGE, FIRST), "dmfs, passthrough")
    assert series
    assert report.ratios(series) == pytest.approx([0.45, 0.5, 0.55])
    assert report.is_reached(series) is False
    report.goals[series.case, series.variant] = 0.5
    assert report.is_reached(series) is True
    del report.goals[series.case, series.variant]
    assert report.is_reached(series) is None


def test_a_missed_goal_is_no_failure(report: CompareReport) -> None:
    assert report.is_met
    assert "✗" in shown(report)


def test_small_sizes_have_no_goals() -> None:
    assert not bench_compare.new_report(bench_compare.QUICK).goals


def test_the_table_fits_a_terminal(report: CompareReport) -> None:
    report.leave_out("JuiceFS", "it said " + "something that is long " * 8)
    text = shown(report)
    assert max(map(len, text.splitlines())) <= WIDTH
    assert line_of(text, "native") == "native 20.00 k pages/s 1"
    assert line_of(text, "dmfs, passthrough") == "dmfs, passthrough 10.00 k pages/s 0.45 0.50 0.55 50% 0.95 ✗"
    assert "Measured: bindfs 1.2.3." in text


def test_what_is_left_out_is_named_and_has_no_figures(report: CompareReport) -> None:
    report.leave_out("rclone", "not installed")
    text = shown(report)
    assert not any(line.startswith("rclone") for line in text.splitlines())
    assert "Left out: rclone: not installed" in text
    document = json.loads(report.as_json())
    assert document["left_out"] == {"rclone": "not installed"}
    assert "rclone" not in {series["variant"] for series in document["series"]}
    assert {series["goal"] for series in document["series"]} == {None, *bench_compare.GOALS.values()}


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_plot_is_drawn_also_with_gaps(report: CompareReport, tmp_path: Path, suffix: str) -> None:
    report.leave_out("bindfs", "not installed")
    case = case_name(LARGE, AGAIN)
    report.series = [series for series in report.series if (series.case, series.variant) != (case, "rclone")]
    file = tmp_path / f"plot{suffix}"
    report.plot(file)
    assert file.stat().st_size > 10_000


def test_a_missing_program_is_named_with_what_installs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bindfs, "program", "no-such-program")
    with pytest.raises(NotInstalled, match="apt-get install bindfs"):
        Bindfs(tmp_path, tmp_path / "home").prepare(0, lambda root: None)


def test_a_program_that_does_not_mount_is_reported_with_its_last_words(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo one; echo two >&2; exit 3"]
    with (
        pytest.raises(MountFailed, match="sh ended with 3: two"),
        served(command, tmp_path / "mnt", log=tmp_path / "log"),
    ):
        pytest.fail("it is not mounted")


def test_a_command_that_takes_too_long_is_ended() -> None:
    with pytest.raises(MountFailed, match="did not end in 0 s"):
        run_command(["sleep", "60"], timeout=0.01)


def test_readers_touch_the_pages_they_are_told(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(bytes(3 * PAGE_SIZE + 1))
    with ReaderPool(1) as pool:
        epoch = pool.read(tmp_path, ["a", "b"], touch=[2 * PAGE_SIZE, 0])
        assert (epoch.files, epoch.bytes) == (2, 4 * PAGE_SIZE)
        epoch = pool.read(tmp_path, ["a"], touch=[3 * PAGE_SIZE])
        assert epoch.bytes == 1
        with pytest.raises(ReadError, match="no-such-file"):
            pool.read(tmp_path, ["no-such-file"], touch=[0])
