"""How much memory could be used without taking it from anybody: of the machine, and of every cgroup we are in.

Reads /proc/meminfo and the memory controller of cgroup v2 or v1 (Documentation/admin-guide/cgroup-v2.rst). No policy.
"""

import os

_NO_LIMIT = 1 << 62


def available(proc: str = "/proc", cgroups: str = "/sys/fs/cgroup") -> int:
    """Bytes that can be used now: free, or page cache that nobody has touched lately. Blocks briefly.

    What cannot be read is no limit; 0 if nothing can.
    """
    found = [_machine(proc), *_cgroups(proc, cgroups)]
    least = min(found)
    return 0 if least == _NO_LIMIT else max(0, least)


def _machine(proc: str) -> int:
    for name, value in _fields(f"{proc}/meminfo").items():
        if name == "MemAvailable":
            return value * 1024
    return _NO_LIMIT


def _cgroups(proc: str, root: str) -> list[int]:
    """What is left in each group that this process is in, from its own up to the root."""
    try:
        with open(f"{proc}/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            lines = [line.rstrip("\n").split(":", 2) for line in file]
    except OSError:
        return []
    left = []
    for _, controllers, path in lines:
        if not controllers:
            names, base = ("memory.max", "memory.current", "inactive_file"), root
        elif "memory" in controllers.split(","):
            names, base = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"), f"{root}/memory"
        else:
            continue
        parts = [part for part in path.split("/") if part]
        for depth in range(len(parts), -1, -1):
            left.append(_left_in("/".join((base, *parts[:depth])), *names))
    return left


def _left_in(group: str, limit_name: str, usage_name: str, inactive_name: str) -> int:
    limit, usage = _number(f"{group}/{limit_name}"), _number(f"{group}/{usage_name}")
    if limit is None or usage is None:
        return _NO_LIMIT
    return limit - usage + _fields(f"{group}/memory.stat").get(inactive_name, 0)


def _number(path: str) -> int | None:
    """None if there is none, or it is "max"."""
    try:
        with open(path, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):
        return None


def _fields(path: str) -> dict[str, int]:
    """The lines "name value" or "name: value kB" of a file as numbers; nothing if it cannot be read."""
    found = {}
    try:
        with open(os.fspath(path), encoding="ascii", errors="replace") as file:
            for line in file:
                name, _, rest = line.replace(":", " ").partition(" ")
                number = rest.split()
                if number and number[0].isdigit():
                    found[name] = int(number[0])
    except OSError:
        pass
    return found
