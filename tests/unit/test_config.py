"""Settings: sizes, precedence, refusals that say where, the way to the daemon as JSON, and the tables in the docs."""

import inspect
import os
import pwd
import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dmfs import config, disks, errors
from dmfs.cli import settings
from dmfs.cli.settings import load_settings
from dmfs.config import CacheConfig, MountConfig, Size
from dmfs.errors import CacheError, ConfigError, UserError

DOCS = Path(__file__).parents[2] / "docs" / "configuration.md"
PLACES = {"source": "/source", "mountpoint": "/mnt"}


def load(flags: Mapping[str, object], *, config_file: str | None, environ: Mapping[str, str]) -> config.MountConfig:
    """The settings without where they came from."""
    return load_settings(flags, config_file=config_file, environ=environ).config


def loaded(text: str | None = None, tmp_path: Path | None = None, /, **flags: object) -> MountConfig:
    """Settings from a YAML text and flags."""
    file = None
    if text is not None:
        assert tmp_path is not None
        (tmp_path / "dmfs.yaml").write_text(text)
        file = str(tmp_path / "dmfs.yaml")
    return load({**PLACES, **flags}, config_file=file, environ={})


class TestSizes:
    @pytest.mark.parametrize(
        ("text", "size"),
        [
            ("110GiB", 110 << 30),
            ("1.5 TB", 1_500_000_000_000),
            (" 64 KiB ", 65536),
            ("4k", 4000),
            ("2g", 2_000_000_000),
            ("2gib", 2 << 30),
            ("1.GiB", 1 << 30),
            (".5GiB", 1 << 29),
            ("123", 123),
            (123, 123),
            (0, 0),
        ],
    )
    def test_bytes(self, text: object, size: int) -> None:
        assert Size.parse(text).resolve(1) == size
        assert config.parse_bytes(text) == size

    @pytest.mark.parametrize(("text", "size"), [("80%", 800), ("12.5 %", 125), ("100%", 1000), ("0%", 0), ("0.1%", 1)])
    def test_shares(self, text: str, size: int) -> None:
        assert Size.parse(text).resolve(1000) == size

    @pytest.mark.parametrize(
        "value",
        ["", "x", "-1", "-1%", -1, "1 XB", "1GiB junk", "1.5", 1.5, True, None, "1e9", "0x10", "inf", "nan", "nan%",
         "1 bit", "8kbit", "%", "GiB", "1,5GiB", "1 GiB 2", [], {}, "٣GiB\n\n5"],
    )  # fmt: skip
    def test_rubbish(self, value: object) -> None:
        with pytest.raises(
            ValueError, match=r"^it should be a size such as 110GiB, 1\.5 TB, 80% or a number of bytes$"
        ):
            Size.parse(value)

    def test_more_than_all(self) -> None:
        with pytest.raises(ValueError, match=r"^it should be at most 100%$"):
            Size.parse("101%")

    @given(st.one_of(st.integers(0, 1 << 62), st.floats(0, 100).map(lambda share: f"{share:f}%")))
    def test_json_round_trip(self, value: object) -> None:
        size = Size.parse(value)
        assert Size.model_validate_json(size.model_dump_json()) == size

    def test_for_people(self) -> None:
        assert str(Size.parse("80%")) == "80%"
        assert str(Size.parse("110GiB")) == "110.0 GiB"


class TestCachePaths:
    @pytest.mark.parametrize(
        ("text", "path", "size"),
        [
            ("/nvme", "/nvme", None),
            ("/nvme:110GiB", "/nvme", "110GiB"),
            ("/nvme:80%", "/nvme", "80%"),
            ("/a:b/c", "/a:b/c", None),
            ("/a:b/c:1GiB", "/a:b/c", "1GiB"),
            ("/a:10GiB:1GiB", "/a:10GiB", "1GiB"),
            ("/a:b/", "/a:b/", None),
            ("/a b,c\n:5 GB", "/a b,c\n", "5 GB"),
        ],
    )
    def test_split(self, text: str, path: str, size: str | None) -> None:
        item = config.split_cache(text)
        assert item["path"] == path
        assert item.get("size") == (Size.parse(size) if size else None)

    def test_existing_folder_may_end_in_anything(self, tmp_path: Path) -> None:
        folder = tmp_path / "disk:one"
        folder.mkdir()
        assert config.split_cache(str(folder)) == {"path": str(folder)}

    @pytest.mark.parametrize("text", ["/nvme:12parsecs", "/nvme:", "/nvme:-1GiB", "/nvme:110 GiBs"])
    def test_mistyped_size_is_not_taken_for_a_path(self, text: str) -> None:
        with pytest.raises(
            ConfigError, match=r"^--cache: cache cannot be .*after the last colon is no size, it should be"
        ):
            loaded(cache=[text])

    @pytest.mark.parametrize("size", ["80", "0", "0%", "4095"])
    def test_size_without_its_unit(self, size: str) -> None:
        with pytest.raises(ConfigError, match=r"^--cache: cache\.size cannot be '.*': it should be "):
            loaded(cache=[f"/nvme:{size}"])


class TestPrecedence:
    def test_defaults_file_variables_flags(self, tmp_path: Path) -> None:
        (tmp_path / "dmfs.yaml").write_text("fills: 2\ndata_threads: 2\nmetadata_threads: 2\n")
        found = load_settings(
            {**PLACES, "fills": 4},
            config_file=str(tmp_path / "dmfs.yaml"),
            environ={"DMFS_FILLS": "3", "DMFS_DATA_THREADS": "3"},
        )
        assert found.config.fills == 4
        assert found.config.data_threads == 3
        assert found.config.metadata_threads == 2
        assert found.config.pieces_in_flight == 16
        assert found.origins == {
            "source": "SOURCE",
            "mountpoint": "MOUNTPOINT",
            "fills": "fills",
            "data_threads": "DMFS_DATA_THREADS",
            "metadata_threads": f"{tmp_path}/dmfs.yaml line 3",
        }

    def test_flags_not_given_overrule_nothing(self) -> None:
        found = load({**PLACES, "immutable": None, "cache": ()}, config_file=None, environ={"DMFS_IMMUTABLE": "yes"})
        assert found.immutable

    def test_flag_overrules_with_its_opposite(self, tmp_path: Path) -> None:
        assert loaded("immutable: true\n", tmp_path, immutable=False).immutable is False

    def test_every_setting_has_its_variable(self) -> None:
        environ = {
            "DMFS_SOURCE": "/source",
            "DMFS_MOUNTPOINT": "/mnt",
            "DMFS_CACHE": "/nvme:80%,/ssd:1GiB",
            "DMFS_IMMUTABLE": "true",
            "DMFS_METADATA_TTL": "0.5",
            "DMFS_ALLOW_OTHER": "1",
            "DMFS_USER": "nobody",
            "DMFS_DATASET_ID": "imagenet",
            "DMFS_VERSION_FROM": "mtime",
            "DMFS_FRONT_END": "pyfuse3",
            "DMFS_IO": "plain",
            "DMFS_READAHEAD": "1MiB",
            "DMFS_LOG_FILE": "/log",
            "DMFS_VERBOSE": "on",
            "DMFS_MIN_FREE": "10%",
            "DMFS_OPEN_WAIT": "1 MiB",
            "DMFS_OPEN_WAIT_SECONDS": "0",
            "DMFS_FILLS": "1",
            "DMFS_PIECES_IN_FLIGHT": "1",
            "DMFS_METADATA_THREADS": "1",
            "DMFS_DATA_THREADS": "1",
        }
        found = load_settings({}, config_file=None, environ=environ)
        assert set(found.origins) == set(MountConfig.model_fields)
        assert found.config.cache == (
            CacheConfig(path="/nvme", size=Size.parse("80%")),
            CacheConfig(path="/ssd", size=Size.parse("1GiB")),
        )
        unchanged = [
            name for name, field in MountConfig.model_fields.items() if getattr(found.config, name) == field.default
        ]
        assert unchanged == []

    def test_empty_and_foreign_variables_are_ignored(self) -> None:
        environ = {"DMFS_FILLS": "", "DMFS_FILS": "3", "DMFS_HOME": "/opt", "DMFS_CACHE": ""}
        assert load(PLACES, config_file=None, environ=environ) == MountConfig.model_validate(PLACES)


class TestUser:
    NOBODY = pwd.getpwnam("nobody")

    @pytest.mark.parametrize("given", ["nobody", str(NOBODY.pw_uid)])
    def test_name_or_number(self, given: str) -> None:
        assert load({**PLACES, "user": given}, config_file=None, environ={}).user == "nobody"

    def test_number_in_yaml(self, tmp_path: Path) -> None:
        assert loaded(f"user: {self.NOBODY.pw_uid}", tmp_path).user == "nobody"

    def test_home_is_the_users(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", "/root")
        found = loaded(user="nobody", cache=("~/c:1GiB",), log_file="~")
        assert found.cache[0].path == f"{self.NOBODY.pw_dir}/c"
        assert found.log_file == self.NOBODY.pw_dir

    @pytest.mark.parametrize("given", ["no-such-user", "4294967294", "", "1" * 40, "-1", "nobody:nogroup"])
    def test_unknown(self, given: str) -> None:
        with pytest.raises(ConfigError, match=r"^--user: user cannot be '.*': this node knows no such user; look with"):
            loaded(user=given)

    @pytest.mark.parametrize("given", ["root", "0"])
    def test_root(self, given: str) -> None:
        with pytest.raises(ConfigError, match=r"^DMFS_USER: user cannot be '.*': it should be an ordinary user; leave"):
            load(PLACES, config_file=None, environ={"DMFS_USER": given})


class TestPaths:
    def test_relative_to_the_current_directory(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        found = load({"source": "a", "mountpoint": "../b"}, config_file=None, environ={"DMFS_CACHE": "c:1GiB"})
        assert found.source == f"{tmp_path}/a"
        assert found.mountpoint == f"{tmp_path}/../b"  # resolved later, with the links
        assert found.cache[0].path == f"{tmp_path}/c"

    def test_relative_to_the_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir("/")
        monkeypatch.setenv("HOME", "/home/me")
        found = loaded("cache: [c, {path: d}, ~/e]\nlog_file: log\n", tmp_path)
        assert [cache.path for cache in found.cache] == [f"{tmp_path}/c", f"{tmp_path}/d", "/home/me/e"]
        assert found.log_file == f"{tmp_path}/log"

    def test_odd_names(self) -> None:
        odd = "/a b,c\n'\"\\:ä"
        found = load({"source": odd, "mountpoint": odd}, config_file=None, environ={})
        assert MountConfig.model_validate_json(found.model_dump_json()).source == odd

    @pytest.mark.parametrize("path", ["/\udcff", "", "/a\0b"])
    def test_impossible_names(self, path: str) -> None:
        with pytest.raises(ConfigError, match=r"^SOURCE: source cannot be '.*': it should be a path"):
            loaded(source=path)


REFUSALS = [
    ("chache: [/a]", "line 1: unknown setting 'chache'; did you mean 'cache'?"),
    ("fills: 1\nmetadata_tll: 5", "line 2: unknown setting 'metadata_tll'; did you mean 'metadata_ttl'?"),
    ("zzz: 1", "line 1: unknown setting 'zzz'; the settings are allow_other, cache,"),
    ("[1, 2]: 3", "line 1: unknown setting 'None'; the settings are"),
    ("cache:\n- path: /a\n  sise: 1GiB", "line 3: unknown setting 'sise'; did you mean 'size'?"),
    ("cache:\n- /a: 1GiB", "line 2: unknown setting '/a'; the settings are path, size"),
    ("fills: 1\nfills: 2", "line 2: fills is set a second time"),
    ("cache:\n- path: /a\n  path: /b", "line 3: path is set a second time"),
    ("cache:\n- size: 1GiB", "line 2: path is missing in cache"),
    ("cache: /a", "line 1: cache cannot be '/a': it should be a list of PATH or PATH:SIZE"),
    ("cache:\n- /a\n- 3", "line 3: cache cannot be 3: it should be PATH or PATH:SIZE"),
    ("cache:\n- /a\n- path: /b\n  size: 5XB", "line 3: cache.size cannot be '5XB': it should be a size such as"),
    ("cache:\n- /a\n- path: 5", "line 3: cache.path cannot be 5: it should be a valid string"),
    ("cache: [/a, /a]", "line 1: cache: /a is named twice"),
    ("fills: many", "line 1: fills cannot be 'many': it should be a valid integer"),
    ("fills: yes", "line 1: fills cannot be True: it should be a number"),
    ("fills: 0", "line 1: fills cannot be 0: it should be greater than or equal to 1"),
    ("fills: 1000000", "line 1: fills cannot be 1000000: it should be less than or equal to 1024"),
    ("fills:", "line 1: fills cannot be None: it should be"),
    ("metadata_ttl: -3", "line 1: metadata_ttl cannot be -3: it should be greater than or equal to 0"),
    ("metadata_ttl: .nan", "line 1: metadata_ttl cannot be nan: it should be"),
    ("metadata_ttl: .inf", "line 1: metadata_ttl cannot be inf: it should be"),
    ("metadata_ttl: on", "line 1: metadata_ttl cannot be True: it should be a number"),
    ("immutable: maybe", "line 1: immutable cannot be 'maybe': it should be a valid boolean"),
    ("front_end: libfuse", "line 1: front_end cannot be 'libfuse': it should be 'kernel' or 'pyfuse3'"),
    ("version_from: size", "line 1: version_from cannot be 'size': it should be 'ctime' or 'mtime'"),
    ("dataset_id: 12", "line 1: dataset_id cannot be 12: it should be a valid string"),
    ("dataset_id: ''", "line 1: dataset_id cannot be '': it should have at least 1 character"),
    ("user: [a]", "line 1: user: it should be a valid string"),
    ("user: yes", "line 1: user cannot be True: it should be a valid string"),
    ("user: ''", "line 1: user cannot be '': this node knows no such user"),
    ("log_file: [a]", "line 1: log_file: it should be a valid string"),
    ("min_free: 150%", "line 1: min_free cannot be '150%': it should be at most 100%"),
    (
        "open_wait: 10%",
        "line 1: open_wait cannot be '10%': it should be a size such as 8 MiB, 64KB or a number of bytes",
    ),
    ("- a", "line 1: the file should be lines such as fills: 8"),
    ("just words", "line 1: the file should be lines such as fills: 8"),
    ("fills: 1\ncache: [", "line 2: this is not YAML: "),
    ("fills: *nowhere", "line 1: this is not YAML: found undefined alias 'nowhere'"),
    ("fills: 2020-99-99", "line 1: this is not YAML: month must be in 1..12"),
    ("fills: !!python/object/apply:os.system [ls]", "line 1: this is not YAML: could not determine a constructor"),
    ("fills: 1\n\nverbose: \x07", "line 3: this is not YAML: special characters are not allowed"),
    ("--- {}\n--- {}", "line 2: this is not YAML: "),
    ("cache: " + "[" * 500, "this is no configuration file, it is nested too deep"),
    ("#" * 1_100_000, "this is no configuration file, it is larger than"),
]


class TestYaml:
    @pytest.mark.parametrize(("text", "sentence"), REFUSALS, ids=[sentence[:60] for _, sentence in REFUSALS])
    def test_refusals_name_file_and_line(self, tmp_path: Path, text: str, sentence: str) -> None:
        with pytest.raises(ConfigError) as refused:
            loaded(text, tmp_path)
        found = str(refused.value)
        assert found.startswith(f"{tmp_path}/dmfs.yaml")
        assert sentence in found
        assert "\n" not in found

    def test_not_utf8(self, tmp_path: Path) -> None:
        (tmp_path / "dmfs.yaml").write_bytes(b"fills: 1\nlog_file: \xff\n")
        with pytest.raises(ConfigError, match=r"dmfs\.yaml line 2: this is not YAML"):
            settings.read_yaml(str(tmp_path / "dmfs.yaml"))

    def test_unreadable(self, tmp_path: Path) -> None:
        for name, reason in ((tmp_path / "nowhere", "No such file or directory"), (tmp_path, "Is a directory")):
            with pytest.raises(ConfigError, match=f"^{name}: the configuration file cannot be read: {reason}$"):
                settings.read_yaml(str(name))

    @pytest.mark.parametrize("text", ["", "# nothing\n", "---\n", "{}"])
    def test_nothing(self, tmp_path: Path, text: str) -> None:
        assert loaded(text, tmp_path) == MountConfig.model_validate(PLACES)

    def test_null_is_the_default_that_is_none(self, tmp_path: Path) -> None:
        assert loaded("metadata_ttl: null\nlog_file:\n", tmp_path) == MountConfig.model_validate(PLACES)

    @given(st.binary(max_size=200))
    def test_any_bytes_are_read_or_refused_in_a_sentence(self, text: bytes) -> None:
        path = Path(self.folder) / "fuzz.yaml"
        path.write_bytes(text)
        sentence = str(path)
        try:
            load(PLACES, config_file=str(path), environ={})
        except ConfigError as exc:
            sentence = str(exc)
        assert sentence.startswith(str(path))

    @pytest.fixture(autouse=True)
    def _folder(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        self.folder = tmp_path_factory.getbasetemp()


class TestOtherRefusals:
    @pytest.mark.parametrize(
        ("environ", "sentence"),
        [
            ({"DMFS_FILLS": "0"}, "DMFS_FILLS: fills cannot be '0': it should be greater than or equal to 1"),
            ({"DMFS_CACHE": "/a:1GiB,/b:zz"}, "DMFS_CACHE: cache cannot be '/b:zz': 'zz' after the last colon"),
            ({"DMFS_VERBOSE": "loud"}, "DMFS_VERBOSE: verbose cannot be 'loud': it should be a valid boolean"),
        ],
    )
    def test_variables(self, environ: Mapping[str, str], sentence: str) -> None:
        with pytest.raises(ConfigError, match="^" + re.escape(sentence)):
            load(PLACES, config_file=None, environ=environ)

    def test_flags(self) -> None:
        with pytest.raises(
            ConfigError, match=r"^--metadata-ttl: metadata_ttl cannot be 'soon': it should be a valid number"
        ):
            loaded(metadata_ttl="soon")

    def test_missing_places(self) -> None:
        with pytest.raises(
            ConfigError, match=r"^no source is given: write dmfs mount SOURCE MOUNTPOINT, or source: in the"
        ):
            load({}, config_file=None, environ={})
        with pytest.raises(ConfigError, match=r"^no mountpoint is given: "):
            load({"source": "/a"}, config_file=None, environ={})


def test_models_are_values() -> None:
    made = MountConfig.model_validate({**PLACES, "cache": [{"path": "/a", "size": "80%"}, {"path": "/b"}]})
    assert MountConfig.model_validate_json(made.model_dump_json()) == made
    assert hash(made) == hash(MountConfig.model_validate_json(made.model_dump_json()))
    with pytest.raises(ValueError, match="frozen"):
        made.fills = 3
    with pytest.raises(ValueError, match="Extra inputs are not permitted"):
        MountConfig.model_validate({**PLACES, "fils": 3})
    with pytest.raises(ValueError, match="it should be an absolute path"):
        MountConfig(source="a", mountpoint="/b")


class TestDefaultCache:
    """The kinds of file systems are made up, the folders are real."""

    @pytest.fixture(autouse=True)
    def _all_is_disk(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kinds: dict[str, disks.FileSystem] = {}
        self.free = 1000 * 4096
        monkeypatch.setattr(disks, "file_system", lambda path: self.kinds.get(path, disks.FileSystem("ext4", "disk")))
        monkeypatch.setattr(disks, "room", lambda path: disks.Room(10 * self.free, self.free))

    def test_first_that_is_a_local_disk(self, tmp_path: Path) -> None:
        environ = {}
        for name, folder in (("SLURM_TMPDIR", "job"), ("TMPDIR", "tmp"), ("HOME", "home")):
            (tmp_path / folder).mkdir()
            environ[name] = str(tmp_path / folder)
        half = Size.parse(500 * 4096)
        assert config.default_cache(environ) == CacheConfig(path=f"{tmp_path}/job/dmfs", size=half)
        self.kinds[f"{tmp_path}/job"] = disks.FileSystem("Lustre", "network")
        assert config.default_cache(environ).path == f"{tmp_path}/tmp/dmfs"
        self.kinds[f"{tmp_path}/tmp"] = disks.FileSystem("tmpfs", "memory")
        assert config.default_cache(environ).path == f"{tmp_path}/home/.cache/dmfs"
        self.kinds[f"{tmp_path}/home"] = disks.FileSystem("NFS", "network")
        with pytest.raises(CacheError) as refused:
            config.default_cache(environ)
        assert str(refused.value) == (
            "no cache is given and the usual places will not do ($SLURM_TMPDIR is on Lustre, not on a local disk; "
            "$TMPDIR is on tmpfs, not on a local disk; ~/.cache is on NFS, not on a local disk): "
            "give one on a local disk with --cache PATH[:SIZE]"
        )

    def test_what_will_not_do(self, tmp_path: Path) -> None:
        self.free = 4096
        environ = {"SLURM_TMPDIR": f"{tmp_path}/missing", "TMPDIR": "tmp", "HOME": str(tmp_path)}
        with pytest.raises(CacheError) as refused:
            config.default_cache(environ)
        for reason in ("$SLURM_TMPDIR does not exist", "$TMPDIR is not an absolute path", "~/.cache has no space left"):
            assert reason in str(refused.value)
        with pytest.raises(CacheError, match=r"\$TMPDIR is not set; ~/.cache is not set"):
            config.default_cache({})

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
    def test_not_writable(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o500)
        with pytest.raises(CacheError, match=r"\$TMPDIR is not writable"):
            config.default_cache({"TMPDIR": str(tmp_path)})

    def test_size_stays_while_the_disk_fills_up(self, tmp_path: Path) -> None:
        first = config.default_cache({"TMPDIR": str(tmp_path)})
        assert first.size is not None
        config.remember_size(first.path, first.size.resolve(0))
        self.free //= 2
        assert config.default_cache({"TMPDIR": str(tmp_path)}) == first
        config.remember_size(first.path, 1)
        assert config.default_cache({"TMPDIR": str(tmp_path)}) == first
        assert os.stat(first.path).st_mode & 0o777 == 0o700

    def test_rubbish_in_place_of_the_size(self, tmp_path: Path) -> None:
        (tmp_path / "dmfs").mkdir()
        (tmp_path / "dmfs/default-size").write_bytes(b"\xff")
        assert config.default_cache({"TMPDIR": str(tmp_path)}).size == Size.parse(500 * 4096)

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
    def test_shared_directory_gets_a_folder_of_ones_own(self, tmp_path: Path) -> None:
        os.chown(tmp_path, 12345, 12345)
        assert config.default_cache({"TMPDIR": str(tmp_path)}).path == f"{tmp_path}/dmfs-cache-0"

    def test_nothing_is_made(self, tmp_path: Path) -> None:
        config.default_cache({"HOME": str(tmp_path)})
        assert list(tmp_path.iterdir()) == []


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table under a heading of docs/configuration.md, without its first two lines."""
    text = DOCS.read_text().split(f"\n## {heading}\n", 1)[1]
    table = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)
    assert table
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[0].splitlines()[2:]]


def test_docs_have_the_settings() -> None:
    documented = {}
    for name, flag, variable, default, meaning in rows("Settings"):
        assert variable == f"`{settings.variable(name.strip('`'))}`"
        assert flag == (f"`{settings.FLAGS[name.strip('`')]}`" if name.strip("`") in settings.FLAGS else "")
        documented[name.strip("`")] = (default, meaning)
    assert list(documented) == list(MountConfig.model_fields)
    for name, field in MountConfig.model_fields.items():
        default, meaning = documented[name]
        assert meaning == field.description, name
        if field.is_required():
            assert default == "required"
        elif name != "cache":
            given = [] if default == "none" else [(name, default)]
            assert MountConfig.model_validate({**PLACES, **dict(given)}) == MountConfig.model_validate(PLACES), name


def test_docs_have_the_exit_codes() -> None:
    documented = {int(code): name.strip("`") for code, name, _ in rows("Exit codes")}
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, UserError)]
    assert {code: name for code, name in documented.items() if name} == {
        kind.exit_code: kind.__name__ for kind in kinds
    }
    assert {0, 2, 130} <= set(documented)
