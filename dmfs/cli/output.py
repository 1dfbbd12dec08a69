"""Words on the terminal: notes and refusals, amounts and times for people. Imports nothing heavy."""

import sys

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def printable(text: str) -> str:
    """`text` with control characters and undecodable bytes written as escapes, so that it stays on its line."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def note(sentence: str) -> None:
    """Say something on standard error."""
    print(f"dmfs: {printable(sentence)}", file=sys.stderr, flush=True)


def amount(size: int) -> str:
    """Bytes with a unit: 1536 is "1.5 KiB"."""
    value = float(size)
    for unit in _UNITS[:-1]:
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} {_UNITS[-1]}"


def duration(seconds: float) -> str:
    """Seconds with the two largest units: 7500 is "2 h 5 min"."""
    whole = max(0, int(seconds))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours} h"
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {whole % 60} s" if minutes else f"{whole} s"
