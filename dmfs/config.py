"""The settings of one mount: what they are, which values they take, and their defaults.

Where values come from is the command line's business (cli/settings.py). The daemon gets its settings as JSON:
`MountConfig.model_dump_json` and `model_validate_json`. docs/configuration.md has the table for people; a test holds it
and these models together.
"""

import os
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    TypeAdapter,
    field_validator,
    model_serializer,
    model_validator,
)

from dmfs import disks
from dmfs.errors import CacheError
from dmfs.types import AskedIo, KiB, MiB, VersionFrom

LEAST_CACHE = 4096  # bytes; less is a size without its unit
SIZE_FORMS = "a size such as 110GiB, 1.5 TB, 80% or a number of bytes"

_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)"
_BYTES = re.compile(rf"{_NUMBER}\s*(?:[kmgtpe]?b|[kmgtpe]i?b?)?", re.IGNORECASE)
_PERCENT = re.compile(rf"({_NUMBER})\s*%")
_BYTE_SIZE = TypeAdapter(ByteSize)


def parse_bytes(value: object) -> int:
    """Bytes of a plain integer, or of text with a unit: KB, MB, GB... are powers of 1000, KiB, MiB, GiB... of 1024.

    Raises:
        ValueError: with a sentence, for anything else.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str) and _BYTES.fullmatch(value.strip()) and not re.fullmatch(r"\d*\.\d*", value.strip()):
        text = re.sub(r"\.(?=\s*[a-z]|$)", "", value.strip(), flags=re.IGNORECASE)  # ByteSize refuses "1.GiB"
        return int(_BYTE_SIZE.validate_python(text))
    raise ValueError("it should be a size such as 8 MiB, 64KB or a number of bytes")


class Size(BaseModel):
    """An amount of disk: bytes, or a share of the file system; one of the two is set. In JSON it is 123 or "80%"."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bytes: int | None = None
    percent: float | None = None

    @classmethod
    def parse(cls, value: object) -> "Size":
        """The size that text or an integer stands for. Raises ValueError with a sentence."""
        percent = _PERCENT.fullmatch(value.strip()) if isinstance(value, str) else None
        if percent:
            share = float(percent[1])
            if share > 100:
                raise ValueError("it should be at most 100%")
            return cls.model_construct(percent=share)
        try:
            return cls.model_construct(bytes=parse_bytes(value))
        except ValueError:
            raise ValueError(f"it should be {SIZE_FORMS}") from None

    @model_validator(mode="wrap")
    @classmethod
    def _from_text(cls, value: object, handler: object) -> "Size":
        return value if isinstance(value, Size) else cls.parse(value)

    @model_serializer
    def _to_text(self) -> int | str:
        # By way of Decimal, since a float as small as 0.00001 is written 1e-05, which is no size.
        return self.bytes if self.bytes is not None else f"{Decimal(repr(self.percent)):f}%"

    def __str__(self) -> str:
        return f"{self.percent:g}%" if self.bytes is None else ByteSize(self.bytes).human_readable(separator=" ")

    def resolve(self, total: int) -> int:
        """Bytes, where `total` is the size of the file system in bytes."""
        return self.bytes if self.bytes is not None else int(total * (self.percent or 0) / 100)


def _absolute(path: str) -> str:
    if not path.startswith("/") or "\0" in path:
        raise ValueError("it should be an absolute path")
    return path


def _number(value: object) -> object:
    if isinstance(value, bool):  # a YAML "yes" must not become 1
        raise ValueError("it should be a number")
    return value


def _enough(size: Size) -> Size:
    if size.bytes is not None and size.bytes < LEAST_CACHE:
        raise ValueError(f"it should be {SIZE_FORMS}, and at least {LEAST_CACHE} bytes (is the unit missing?)")
    if size.percent == 0:
        raise ValueError("it should be more than 0%")
    return size


AbsolutePath = Annotated[str, AfterValidator(_absolute)]
Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Seconds = Annotated[float, BeforeValidator(_number), Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, BeforeValidator(_number), Field(ge=1, le=1024)]


class CacheConfig(BaseModel):
    """One tier: a folder, and how much of its file system dmfs may take."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: AbsolutePath = Field(description="the folder; made if it is missing")
    size: Annotated[Size, AfterValidator(_enough)] | None = Field(
        default=None,
        description="most bytes of copies, a share being of the whole file system; none: all that min_free leaves",
    )


class MountConfig(BaseModel):
    """Everything the daemon of one mount is told. Times are seconds, sizes bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    source: AbsolutePath = Field(description="the dataset directory on the shared file system; never written to")
    mountpoint: AbsolutePath = Field(description="the empty directory where the view appears")
    cache: tuple[CacheConfig, ...] = Field(
        default=(), description="folders on local disks that keep the copies, fastest first, each PATH or PATH:SIZE"
    )
    immutable: bool = Field(
        default=False, description="the source never changes: nothing is ever looked at a second time"
    )
    metadata_ttl: Seconds | None = Field(
        default=None,
        description="seconds for which attributes and listings are believed; none: a tenth of the file's age, "
        "at least 60 s, at most 1 h",
    )
    allow_other: bool = Field(default=False, description="let other users, root included, use the mount")
    user: str | None = Field(
        default=None,
        min_length=1,
        description="for root: the user whom the mount is for, and who its daemon becomes; none: the one who mounts",
    )
    dataset_id: str | None = Field(
        default=None, min_length=1, description="what names the dataset in the cache; none: the real path of the source"
    )
    version_from: VersionFrom = Field(
        default="ctime",
        description="what makes a version of a file: ctime (with size and mtime), or mtime (with size) alone",
    )
    front_end: Literal["kernel", "pyfuse3"] = Field(
        default="kernel", description="what speaks FUSE: kernel, or pyfuse3"
    )
    io: AskedIo = Field(
        default="auto",
        description="how bytes get to readers: auto (the best that works), passthrough, pagecache, or plain",
    )
    readahead: Bytes = Field(
        default=512 * KiB, description="bytes the kernel reads ahead of a reader; only root can change its 128 KiB"
    )
    log_file: AbsolutePath | None = Field(
        default=None, description="file the log is appended to; none: the terminal in the foreground, else no log"
    )
    verbose: bool = Field(default=False, description="log more")
    min_free: Size = Field(
        default=Size.parse("5%"),
        description="what is always left free on each cache's file system, a share being of the whole",
    )
    open_wait: Bytes = Field(default=8 * MiB, description="files up to this size are copied before their open returns")
    open_wait_seconds: Seconds = Field(
        default=10.0, description="seconds after which such an open goes on without the copy"
    )
    fills: Count = Field(default=8, description="files copied at the same time")
    pieces_in_flight: Count = Field(
        default=16, description="pieces (4 MiB) being copied at the same time, over all files"
    )
    metadata_threads: Count = Field(
        default=32, description="look-ups and listings asked of the source at the same time"
    )
    data_threads: Count = Field(default=16, description="reads asked of the source and of slow tiers at the same time")

    @field_validator("cache")
    @classmethod
    def _caches_differ(cls, caches: tuple[CacheConfig, ...]) -> tuple[CacheConfig, ...]:
        paths = [cache.path for cache in caches]
        for path in paths:
            if paths.count(path) > 1:
                raise ValueError(f"{path} is named twice")
        return caches


def split_cache(text: str) -> dict[str, object]:
    """PATH[:SIZE] as {path, size}. The path may have colons: only a last part that is a size counts as one.

    Raises ValueError where a last part looks like a size that was mistyped.
    """
    path, colon, last = text.rpartition(":")
    if not colon or "/" in last:
        return {"path": text}
    try:
        return {"path": path, "size": Size.parse(last)}
    except ValueError as exc:
        if os.path.isdir(text):
            return {"path": text}
        raise ValueError(f"{last!r} after the last colon is no size, {exc}") from None


def default_cache(environ: Mapping[str, str]) -> CacheConfig:
    """The cache of a mount that names none: on the first local disk among $SLURM_TMPDIR, $TMPDIR and ~/.cache.

    It may take half of what was free there the first time. That size is kept in the folder (`remember_size`), else each
    start would take half of what the copies of the last one left.

    Raises:
        CacheError: none of them will do; says why each will not.
    """
    home = environ.get("HOME", "")
    candidates = {
        "$SLURM_TMPDIR": environ.get("SLURM_TMPDIR", ""),
        "$TMPDIR": environ.get("TMPDIR", ""),
        "~/.cache": os.path.join(home, ".cache") if home else "",
    }
    reasons = []
    for name, base in candidates.items():
        reason = _unusable(base, may_be_made=name == "~/.cache")
        if reason:
            reasons.append(f"{name} {reason}")
            continue
        own = os.stat(disks.existing_parent(base)).st_uid == os.getuid()
        # Not dmfs-UID: in /tmp that is the runtime directory.
        path = os.path.join(os.path.realpath(base), "dmfs" if own else f"dmfs-cache-{os.getuid()}")
        size = _remembered_size(path) or disks.room(path).free // 2
        if size >= LEAST_CACHE:
            return CacheConfig(path=path, size=Size.parse(size))
        reasons.append(f"{name} has no space left")
    raise CacheError(
        f"no cache is given and the usual places will not do ({'; '.join(reasons)}): "
        "give one on a local disk with --cache PATH[:SIZE]"
    )


def _unusable(base: str, *, may_be_made: bool) -> str | None:
    """Why a folder cannot hold the default cache, None if it can."""
    if not base:
        return "is not set"
    if not base.startswith("/"):
        return "is not an absolute path"
    at = os.path.dirname(base) if may_be_made and not os.path.exists(base) else base
    try:
        if not os.path.isdir(at):
            return "does not exist"
        if not os.access(at, os.W_OK | os.X_OK):
            return "is not writable"
        found = disks.file_system(at)
    except OSError as exc:
        return f"cannot be looked at ({exc.strerror})"
    return None if found.kind == "disk" else f"is on {found.name}, not on a local disk"


_SIZE_FILE = "default-size"


def _remembered_size(path: str) -> int | None:
    try:
        with open(os.path.join(path, _SIZE_FILE), encoding="ascii") as file:
            return int(file.read(32))
    except (OSError, ValueError):
        return None


def remember_size(path: str, size: int) -> None:
    """Keep the size that `default_cache` chose, in bytes, for the next start.

    A folder that cannot be written is the concern of the tier that is about to use it, so it is no error here.
    """
    target = os.path.join(path, _SIZE_FILE)
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        if not os.path.exists(target):
            with open(f"{target}.{os.getpid()}", "w", encoding="ascii") as file:
                file.write(f"{size}\n")
            os.replace(file.name, target)
    except OSError:
        return
