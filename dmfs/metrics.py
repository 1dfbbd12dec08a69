"""Counters of one daemon, plain integers since its start. Only the event loop's thread writes them, but for those of
the calls to the source, which each call's own thread counts under a lock (`tiers.source`). Anybody may read.

`served` counts what readers got and from where, `source` what dmfs itself did at the source, `fills` the copying.
Bytes are plain integers. The names are those of `dmfs status --json` (docs/configuration.md).
"""

from dataclasses import asdict, dataclass, field


class _Counters:
    __slots__ = ()

    def as_dict(self) -> dict[str, int]:
        """The counters by name."""
        return asdict(self)  # type: ignore[call-overload,no-any-return]


@dataclass(slots=True)
class Served(_Counters):
    """Answers given to readers from one place: files opened, READ messages answered, bytes in those answers."""

    opens: int = 0
    reads: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Handed(_Counters):
    """Opens of which the kernel got the copy, to read it by itself, and the sizes of those files together.

    How much of them was read is not seen: `file_bytes` is what it was at most, if each was read once.
    """

    opens: int = 0
    file_bytes: int = 0


@dataclass(slots=True)
class Pushes(_Counters):
    """Files put into the kernel's page cache before they were asked for, and their bytes."""

    files: int = 0
    bytes: int = 0


@dataclass(slots=True)
class SourceCalls(_Counters):
    """Calls made at the source. `stats` are look-ups by path; an fstat of an open file is none, and is not counted."""

    opens: int = 0
    reads: int = 0
    bytes: int = 0
    stats: int = 0
    listings: int = 0


@dataclass(slots=True)
class FillCounts(_Counters):
    """Whole-file copies: ended well, ended in a fault or dropped unfinished, and the bytes written to tiers."""

    done: int = 0
    failed: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Metrics:
    """All counters.

    `surprises` counts exceptions nobody expected, each answered EIO; `stale_served` the answers given from expired
    metadata because the source could not be asked.
    """

    local: Served = field(default_factory=Served)
    peer: Served = field(default_factory=Served)
    source_served: Served = field(default_factory=Served)
    kernel: Handed = field(default_factory=Handed)
    pushes: Pushes = field(default_factory=Pushes)
    source: SourceCalls = field(default_factory=SourceCalls)
    fills: FillCounts = field(default_factory=FillCounts)
    stale_served: int = 0
    surprises: int = 0


@dataclass(slots=True)
class WarmProgress:
    """What a request to warm files has come to so far; `failed` names some of them as (path, reason)."""

    files: int = 0
    bytes: int = 0
    fetched: int = 0
    fetched_bytes: int = 0
    pushed: int = 0
    pushed_bytes: int = 0
    no_room: int = 0
    no_memory: int = 0
    failures: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)

    def numbers(self) -> dict[str, int]:
        """All but `failed`, by name."""
        return {name: value for name, value in asdict(self).items() if name != "failed"}
