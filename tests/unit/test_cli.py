"""The command line around its commands: help, exit codes, what is loaded, words, paths, calls that may hang."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import dmfs
from dmfs import runtime
from dmfs.cli import bounded, main, output, paths
from dmfs.errors import NotMounted
from tests.support.waiting import wait_until

# bounded.call forks; here other tests may have left idle threads, in the command line there are none.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))


class TestOutput:
    @pytest.mark.parametrize(
        ("size", "text"),
        [
            (0, "0 B"),
            (999, "999 B"),
            (1000, "1.0 KiB"),
            (1536, "1.5 KiB"),
            (1 << 20, "1.0 MiB"),
            (1 << 60, "1024.0 PiB"),
        ],
    )
    def test_amount(self, size: int, text: str) -> None:
        assert output.amount(size) == text

    @pytest.mark.parametrize(
        ("seconds", "text"),
        [(-1, "0 s"), (59.9, "59 s"), (60, "1 min 0 s"), (7500, "2 h 5 min"), (90000, "1 d 1 h")],
    )
    def test_duration(self, seconds: float, text: str) -> None:
        assert output.duration(seconds) == text

    def test_names_stay_on_their_line(self) -> None:
        assert output.printable("/a b/ä\n\x1b[31m\udcff") == "/a b/ä\\n\\x1b[31m\\udcff"


class TestPaths:
    def test_links_and_relative_paths(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "real/mnt").mkdir(parents=True)
        (tmp_path / "link").symlink_to("real")
        (tmp_path / "real/to").symlink_to("../link/mnt")
        (tmp_path / "loop").symlink_to("loop")
        monkeypatch.chdir(tmp_path / "real")
        real = str(tmp_path / "real/mnt")
        for path in ("mnt", "./mnt/", "to", "../link/to", f"{tmp_path}/link/mnt", real):
            assert paths.real_mountpoint(path) == real, path
        assert paths.real_mountpoint("missing/too") == str(tmp_path / "real/missing/too")
        assert paths.real_mountpoint("/") == "/"
        assert paths.real_mountpoint(f"{tmp_path}/loop") == str(tmp_path / "loop")

    def test_is_inside(self) -> None:
        assert paths.is_inside("/a/b", "/a")
        assert paths.is_inside("/a", "/a")
        assert paths.is_inside("/a", "/")
        assert not paths.is_inside("/ab", "/a")
        assert not paths.is_inside("/a", "/a/b")


class TestBounded:
    def test_results_and_errors_come_through(self) -> None:
        assert bounded.call(10, os.path.join, "a" * 100_000, "b") == "a" * 100_000 + "/b"
        with pytest.raises(FileNotFoundError) as missing:
            bounded.call(10, os.stat, "/nowhere")
        assert missing.value.filename == "/nowhere"
        with pytest.raises(ZeroDivisionError):
            bounded.call(10, divmod, 1, 0)

    def test_what_hangs_is_killed(self) -> None:
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            bounded.call(0.05, time.sleep, 60)
        assert time.monotonic() - start < 5
        with pytest.raises(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)

    def test_what_dies_is_an_error(self) -> None:
        with pytest.raises(OSError, match=r"the process that looked died"):
            bounded.call(10, os._exit, 1)

    def test_child_holds_no_pipe_of_ours(self) -> None:
        """One that hangs for good must not keep somebody waiting for the end of our output."""
        read, write = os.pipe()
        with pytest.raises(TimeoutError):
            bounded.call(0.05, time.sleep, 60)
        os.close(write)
        assert os.read(read, 1) == b""
        os.close(read)

    def test_stream_works_ahead_as_far_as_a_pipe_holds(self, tmp_path: Path) -> None:
        log = tmp_path / "log"
        with bounded.Stream(count_up, 1000, log) as stream:
            assert [stream.take(10)[0] for _ in range(3)] == [0, 1, 2]
            wait_until(lambda: log.stat().st_size > 20, 10, "it works ahead")
            assert log.stat().st_size < 200
            assert [stream.take(10)[0] for _ in range(997)] == list(range(3, 1000))
            for _ in range(2):
                with pytest.raises(EOFError):
                    stream.take(10)
        with pytest.raises(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)

    def test_stream_may_be_asked_again(self, tmp_path: Path) -> None:
        gate = tmp_path / "gate"
        os.mkfifo(gate)
        with bounded.Stream(Path.read_text, gate) as stream:
            with pytest.raises(TimeoutError):
                stream.take(0.05)
            gate.write_text("a")
            assert stream.take(10) == "a"

    def test_stream_ends_with_the_error(self) -> None:
        with bounded.Stream(fail_after_two) as stream:
            assert [stream.take(10), stream.take(10)] == [1, 2]
            for _ in range(2):
                with pytest.raises(NotMounted, match="gone") as caught:
                    stream.take(10)
                assert caught.value.exit_code == 8
        with bounded.Stream(os._exit, 1) as stream:
            for _ in range(2):
                with pytest.raises(OSError, match="the process that looked died"):
                    stream.take(10)


def count_up(end: int, log: Path) -> Iterator[tuple[int, str]]:
    with log.open("ab", buffering=0) as file:
        for number in range(end):
            file.write(b".")
            yield number, "x" * 1000


def fail_after_two() -> Iterator[int]:
    yield 1
    yield 2
    raise NotMounted("gone")


def command_of(name: str | None) -> click.Command:
    if name is None:
        return main.cli
    command = main.cli.get_command(click.Context(main.cli), name)
    assert command is not None
    return command


class TestMain:
    @pytest.mark.parametrize("name", [None, "mount", "umount", "status", "warm"])
    def test_help_has_examples_and_fits(self, name: str | None, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.run([*([name] if name else []), "--help"]) == 0
        text = capsys.readouterr().out
        assert "\n  Examples:\n" in text
        assert f"    dmfs {name or 'mount'} " in text
        assert [line for line in text.splitlines() if len(line) > 80] == []

    def test_help_lists_the_commands(self, capsys: pytest.CaptureFixture[str]) -> None:
        main.run(["-h"])
        text = capsys.readouterr().out
        for name in main.cli.list_commands(click.Context(main.cli)):
            assert f"\n  {name} " in text
            assert command_of(name).name == name

    def test_version(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.run(["--version"]) == 0
        assert capsys.readouterr().out == f"dmfs {dmfs.__version__}\n"

    @pytest.mark.parametrize("arguments", [["nosuch"], ["mount", "--nosuch"], ["mount", "/only-one"], ["umount"]])
    def test_wrong_usage(self, arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        assert main.run(arguments) == 2
        assert "Usage: dmfs" in capsys.readouterr().err

    def test_mistakes_are_sentences(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main.run(["umount", "/no\nwhere"]) == 8
        captured = capsys.readouterr()
        assert captured.err == "dmfs: /no\\nwhere is not a mountpoint: dmfs status lists the mounts of this user\n"
        assert captured.out == ""

    @pytest.mark.parametrize("exc", [KeyboardInterrupt, click.Abort])
    def test_interrupted(
        self, exc: type[BaseException], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def interrupted() -> None:
            raise exc

        monkeypatch.setattr(runtime, "records", interrupted)
        assert main.run(["status"]) == 130
        assert capsys.readouterr().err.strip() == ""

    @pytest.mark.slow
    def test_broken_pipe_is_quiet(self) -> None:
        read, write = os.pipe()
        os.close(read)
        with open(write, "wb") as closed:
            done = subprocess.run(
                [sys.executable, "-m", "dmfs", "status"], stdout=closed, stderr=subprocess.PIPE, timeout=30, check=False
            )
        assert (done.returncode, done.stderr) == (1, b"")

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "arguments", [["status"], ["status", "--json"], ["umount", "/nowhere"], ["warm", "/nowhere", "."], ["--help"]]
    )
    def test_light_commands_load_nothing_heavy(self, arguments: list[str]) -> None:
        code = (
            "import sys; from dmfs.cli.main import run; run(sys.argv[1:]); "
            "print(*{'trio', 'pydantic', 'msgpack', 'yaml', 'rich', 'asyncio'} & set(sys.modules), file=sys.stderr)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=30, check=True
        )
        assert done.stderr.splitlines()[-1] == ""
