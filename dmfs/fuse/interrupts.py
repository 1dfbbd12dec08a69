"""When an interrupted call is to end: at once for a process that is dying, late for one that only handles a signal.

The kernel sends INTERRUPT for any signal, once per request, and a native file system ends a call for a fatal one only:
`open` does not fail with EINTR because a profiler's timer fired. So the first matter is what became of the process.
"""

import signal

PATIENCE = 5.0  # seconds of a call after which a handled signal ends it too: then it hangs, and Ctrl-C is meant
CHECK_INTERVAL = 0.2  # seconds between two looks at a process, since the kernel does not tell of a second signal

_HARMLESS = (
    signal.SIGCHLD,
    signal.SIGCONT,
    signal.SIGSTOP,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
    signal.SIGURG,
    signal.SIGWINCH,
)
_FATAL_BY_DEFAULT = ~sum(1 << (number - 1) for number in _HARMLESS)
_FIELDS = (b"SigPnd:", b"ShdPnd:", b"SigBlk:", b"SigIgn:", b"SigCgt:")


def is_dying(pid: int) -> bool:
    """True if a process or thread is gone, or has a signal waiting that will end it (proc(5), /proc/PID/status)."""
    try:
        with open(f"/proc/{pid}/status", "rb") as file:
            lines = file.read().split(b"\n")
    except OSError:
        return True
    masks = {line[:7]: int(line[7:], 16) for line in lines if line[:7] in _FIELDS}
    pending, shared, blocked, ignored, caught = (masks.get(field, 0) for field in _FIELDS)
    return bool((pending | shared) & ~(blocked | ignored | caught) & _FATAL_BY_DEFAULT)
