"""A source that misbehaves on demand: slowfs with rules that delay, fail, hang, deliver short, or show odd attributes.

A rule says for which operations (the kernel's names, as READ or LOOKUP) and paths it holds, and what happens there; all
rules that match an operation act together, and each counts it. They are set and taken away while the mount runs, by
`BadSource`. A program of its own (`python -m tests.doubles.badsrc`), with slowfs's options, so that a hang is never the
test's.
"""

import os
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from dmfs.types import Stat, unpack_attributes
from scripts.lib.slowfs_client import SlowFs
from scripts.lib.slowfs_server import FUSE_ATTR, SlowFileSystem, Verdict
from scripts.slowfs import main


@dataclass(slots=True)
class Rule:
    """What happens where. As in `BadSource.rule`, whose arguments these are."""

    operation: str
    path: str
    delay: float = 0.0
    error: int = 0
    hangs: bool = False
    limit: int | None = None
    after: int = 0
    times: int | None = None
    attributes: dict[str, int] = field(default_factory=dict)
    calls: int = 0

    def __post_init__(self) -> None:
        FUSE_ATTR.pack(*Stat(*[0] * len(Stat._fields))._replace(**self.attributes))

    def matches(self, operation: str, path: bytes, offset: int, size: int) -> bool:
        if self.times is not None and self.calls >= self.times:
            return False
        if self.after and (operation != "READ" or offset + size <= self.after):
            return False
        return fnmatchcase(operation, self.operation) and self.covers(path)

    def covers(self, path: bytes) -> bool:
        return fnmatchcase(os.fsdecode(path), self.path)


class BadFileSystem(SlowFileSystem):
    """slowfs with rules."""

    def __init__(self, source: str, **options: float) -> None:
        super().__init__(source, **options)
        self._rules: dict[int, Rule] = {}
        self._last_rule = 0

    def before_operation(self, operation: str, path: bytes, offset: int, size: int) -> Verdict | None:
        matching = [rule for rule in self._rules.values() if rule.matches(operation, path, offset, size)]
        for rule in matching:
            rule.calls += 1
        return Verdict(
            delay=sum(rule.delay for rule in matching),
            error=next((rule.error for rule in matching if rule.error), 0),
            hangs=any(rule.hangs for rule in matching),
            limit=min((rule.limit for rule in matching if rule.limit is not None), default=None),
        )

    def attributes(self, path: bytes, st: os.stat_result) -> bytes:
        attributes = super().attributes(path, st)
        for rule in self._rules.values():
            if rule.attributes and rule.covers(path):
                attributes = FUSE_ATTR.pack(*unpack_attributes(attributes)._replace(**rule.attributes))
        return attributes

    def control(self, request: dict[str, Any]) -> dict[str, Any]:
        match request:
            case {"op": "rule", **options}:
                rule = Rule(**options)
                self._last_rule += 1
                self._rules[self._last_rule] = rule
                return {"rule": self._last_rule}
            case {"op": "remove", "rule": number}:
                del self._rules[number]
                return {}
            case {"op": "clear"}:
                self._rules.clear()
                return {"released": self.release_hanging()}
            case {"op": "release"}:
                return {"released": self.release_hanging()}
            case {"op": "calls", "rule": number}:
                return {"calls": self._rules[number].calls}
            case {"op": "hanging"}:
                return {"hanging": self.hanging}
        return super().control(request)


class BadSource(SlowFs):
    """A badsrc of one's own, to be used like `SlowFs`."""

    module = "tests.doubles.badsrc"

    def rule(
        self,
        operation: str = "*",
        path: str = "*",
        *,
        delay: float = 0.0,
        error: int = 0,
        hangs: bool = False,
        limit: int | None = None,
        after: int = 0,
        times: int | None = None,
        attributes: dict[str, int] | None = None,
    ) -> int:
        """Add a rule; returns its number. Without any effect it only counts.

        Args:
            operation: a glob of operations: LOOKUP, GETATTR, OPEN, READ, OPENDIR, READDIR, READLINK, STATFS...
            path: a glob of paths relative to the source, of which `*` matches slashes too; the root is the empty path.
            delay: seconds more.
            error: errno.
            hangs: wait for `release`, or for a signal to the reader.
            limit: bytes that a READ delivers at most: less than there are.
            after: READs only that touch bytes from this offset on.
            times: for so many operations only.
            attributes: values in place of the real ones, by the names of `dmfs.types.Stat`; needs no operation.
        """
        answer = self.request(
            op="rule",
            operation=operation,
            path=path,
            delay=delay,
            error=error,
            hangs=hangs,
            limit=limit,
            after=after,
            times=times,
            attributes=attributes or {},
        )
        return int(answer["rule"])

    def remove(self, rule: int) -> None:
        """Take a rule away; what hangs by it hangs on."""
        self.request(op="remove", rule=rule)

    def clear(self) -> None:
        """Take all rules away and let go on what hangs."""
        self.request(op="clear")

    def release(self) -> int:
        """Let go on what hangs now; returns how many operations."""
        return int(self.request(op="release")["released"])

    def calls(self, rule: int) -> int:
        """How many operations a rule has matched."""
        return int(self.request(op="calls", rule=rule)["calls"])

    def hanging(self) -> int:
        """How many operations hang now."""
        return int(self.request(op="hanging")["hanging"])


if __name__ == "__main__":
    main(obj=BadFileSystem)
