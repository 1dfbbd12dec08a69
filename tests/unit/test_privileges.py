"""Root on its way to an ordinary user: ids, groups, environment and capabilities, in a process of its own."""

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from dmfs import privileges

NOBODY = pwd.getpwnam("nobody")
ROOT = Path(__file__).parents[2]
SYS_ADMIN = 1 << privileges.CAP_SYS_ADMIN

needs_root = pytest.mark.skipif(
    os.geteuid() != 0 or not privileges.has_sys_admin(), reason="needs root with CAP_SYS_ADMIN"
)

BECOME = """
import os, subprocess, sys, threading
from dmfs import privileges

def capabilities(process="self"):
    with open(f"/proc/{process}/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return [int(fields[f"Cap{name}"], 16) for name in ("Eff", "Prm", "Inh", "Amb")]

root_has = capabilities()[1]
privileges.become(privileges.find_account("nobody"))
"""


def run(code: str, **environment: str) -> None:
    """Run `code` after `BECOME` in a process of its own."""
    result = subprocess.run(
        [sys.executable, "-c", BECOME + code],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_accounts() -> None:
    found = privileges.find_account("nobody")
    assert found == ("nobody", NOBODY.pw_uid, NOBODY.pw_gid, NOBODY.pw_dir)
    assert privileges.find_account(str(NOBODY.pw_uid)) == found
    assert privileges.account_of(NOBODY.pw_uid, 4711) == found._replace(gid=4711)
    assert privileges.account_of(4_000_000_001, 4711) == ("4000000001", 4_000_000_001, 4711, "/")


def test_without_becoming_anybody_nothing_changes() -> None:
    before = Path("/proc/thread-self/status").read_text().partition("CapInh")[2].partition("Seccomp")[0]
    with privileges.raised():
        inside = Path("/proc/thread-self/status").read_text().partition("CapInh")[2].partition("Seccomp")[0]
    assert inside == before


@needs_root
def test_all_ids_and_the_environment() -> None:
    run(
        f"""
uid, gid = {NOBODY.pw_uid}, {NOBODY.pw_gid}
assert os.getresuid() == (uid, uid, uid) and os.getresgid() == (gid, gid, gid)
assert sorted(os.getgroups()) == sorted(os.getgrouplist("nobody", gid))
assert os.environ["HOME"] == {NOBODY.pw_dir!r}
assert os.environ["USER"] == os.environ["LOGNAME"] == "nobody"
own = f"/run/user/{{uid}}"
assert os.environ.get("XDG_RUNTIME_DIR") == (own if os.path.isdir(own) else None)
for change in (os.setuid, os.seteuid):
    try:
        change(0)
    except PermissionError:
        continue
    raise AssertionError("root again")
""",
        HOME="/root",
        USER="root",
        XDG_RUNTIME_DIR="/run/user/0",
    )


@needs_root
def test_capabilities_step_by_step() -> None:
    run(
        f"""
assert capabilities() == [{SYS_ADMIN}, root_has, 0, 0]
with privileges.raised():
    assert capabilities() == [root_has, root_has, 0, 0]
assert capabilities() == [{SYS_ADMIN}, root_has, 0, 0]
privileges.settle()
assert capabilities() == [{SYS_ADMIN}, {SYS_ADMIN}, 0, 0]
with privileges.raised():
    assert capabilities() == [{SYS_ADMIN}, {SYS_ADMIN}, 0, 0]
assert privileges.has_sys_admin()
seen = []
thread = threading.Thread(target=lambda: seen.append(capabilities("thread-self")))
thread.start()
thread.join()
assert seen == [[{SYS_ADMIN}, {SYS_ADMIN}, 0, 0]], seen
"""
    )


@needs_root
@pytest.mark.parametrize("step", ["pass", "privileges.settle()"])
def test_a_child_has_nothing(step: str) -> None:
    run(
        f"""
{step}
said = subprocess.run(["cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout
fields = dict(line.split(":", 1) for line in said.splitlines())
for name in ("Eff", "Prm", "Inh", "Amb"):
    assert int(fields[f"Cap{{name}}"], 16) == 0, fields
assert fields["Uid"].split() == ["{NOBODY.pw_uid}"] * 4
"""
    )
