"""The command `dmfs`: loads the module of the command that is used, and turns errors into sentences and exit codes.

The commands themselves are in mount.py, umount.py, status.py and warm.py.
"""

import importlib
import os
import sys

import click

import dmfs
from dmfs.cli.output import note
from dmfs.errors import UserError

INTERRUPTED = 130  # as a shell says of a program ended by SIGINT

_COMMANDS = {
    "mount": "Mount a dataset directory.",
    "umount": "Unmount, and wait until the daemon is gone.",
    "status": "Show what is mounted and what it does.",
    "warm": "Copy files to the local disks before they are asked for.",
}


class _LazyGroup(click.Group):
    """Loads dmfs.cli.NAME when the command NAME is used: `dmfs status` is to be quick."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"dmfs.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(dmfs.__version__, prog_name="dmfs", message="%(prog)s %(version)s")
def cli() -> None:
    """Keep a deep-learning dataset on the local disks of the nodes that read it.

    \b
    Examples:
      dmfs mount /lustre/imagenet /tmp/imagenet --cache /nvme:80%
      dmfs status /tmp/imagenet
      dmfs warm /tmp/imagenet val
      dmfs umount /tmp/imagenet

    Exit codes: 0 well, 1 fault, 2 wrong usage; docs/configuration.md has the
    others.
    """


def main() -> None:
    """Entry point of the command line."""
    sys.exit(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    try:
        result = cli.main(arguments, prog_name="dmfs", standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except UserError as exc:
        note(str(exc))
        return exc.exit_code
    except click.ClickException as exc:
        exc.show()
        return exc.exit_code
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        # What is still buffered must not raise again when Python flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return UserError.exit_code  # as click says of those it meets itself
