"""`dmfs mount`: gathers the settings, has them checked, and starts the daemon."""

import os

import click

from dmfs import disks, privileges
from dmfs.cli import checks, launch, settings
from dmfs.cli.output import amount, note, printable
from dmfs.config import CacheConfig, MountConfig, remember_size
from dmfs.errors import ConfigError, FuseUnavailable


@click.command("mount", context_settings={"show_default": False})
@click.argument("source", required=False)
@click.argument("mountpoint", required=False)
@click.option(
    "--cache",
    metavar="PATH[:SIZE]",
    multiple=True,
    help="Local folder for the copies, and how much it may take: 110GiB, 80%. Repeat for more, fastest first.",
)
@click.option("--config", "config_file", metavar="FILE", help="YAML file with settings.")
@click.option("--immutable/--no-immutable", default=None, help="The source never changes: look at nothing twice.")
@click.option("--metadata-ttl", metavar="S", help="Seconds for which attributes and listings are believed.")
@click.option("--allow-other/--no-allow-other", default=None, help="Let other users, root included, use the mount.")
@click.option(
    "--user", metavar="NAME", help="Root mounts for this user; the daemon becomes NAME and may do no more than NAME."
)
@click.option("--dataset-id", metavar="ID", help="Name of the dataset in the cache, in place of the source's path.")
@click.option("--front-end", type=click.Choice(["kernel", "pyfuse3"]), help="What speaks FUSE.")
@click.option(
    "--io",
    type=click.Choice(["auto", "passthrough", "pagecache", "plain"]),
    help="How bytes get to readers. auto: the kernel reads local copies itself (passthrough) where it can, "
    "else opens cost nothing (pagecache).",
)
@click.option("--readahead", metavar="SIZE", help="How much the kernel reads ahead: 512KiB. Only root can change it.")
@click.option("--log-file", metavar="FILE", help="Append the daemon's log to this file.")
@click.option("-f", "--foreground", is_flag=True, help="Stay in the foreground, log to the terminal, end with Ctrl-C.")
@click.option("--dry-run", is_flag=True, help="Check everything, print what would be mounted, and mount nothing.")
@click.option("-v", "--verbose/--no-verbose", default=None, help="Log more.")
def command(foreground: bool, dry_run: bool, config_file: str | None, **flags: object) -> None:
    """Mount the dataset directory SOURCE at the empty directory MOUNTPOINT.

    The view is read-only. What is read is copied to the cache once and read
    from there ever after, also by later mounts. Returns when the mount answers.

    \b
    Examples:
      # half of what is free in $SLURM_TMPDIR, $TMPDIR or ~/.cache
      dmfs mount /lustre/imagenet /tmp/imagenet
      # two disks, fastest first
      dmfs mount /lustre/imagenet /tmp/imagenet \\
          --cache /nvme/dmfs:80% --cache /ssd/dmfs:500GiB
      # a dataset that is never written to again
      dmfs mount /lustre/imagenet /tmp/imagenet --immutable
      # as root, for a user whose source does not trust root
      dmfs mount /lustre/imagenet /tmp/imagenet --user alice
      # what would happen
      dmfs mount /lustre/imagenet /tmp/imagenet --dry-run

    Settings may also come from a YAML file (--config) and from DMFS_*
    variables; docs/configuration.md lists them all.
    """
    if flags["source"] is not None and flags["mountpoint"] is None:
        raise click.UsageError("give both SOURCE and MOUNTPOINT")
    if foreground:
        from dmfs import daemon  # trio and all of dmfs; in the background the daemon's process loads them
    environ = dict(os.environ)
    gathered = settings.load_settings(flags, config_file=config_file, environ=environ)
    if gathered.config.user is not None:
        _become(gathered.config.user, gathered.origins["user"])
    checked = checks.check(gathered.config, os.environ, mend=not dry_run)
    for sentence in checked.notes:
        note(sentence)
    if dry_run:
        _print_plan(checked, gathered.origins)
        return
    config = checked.config
    if checked.is_default_cache:
        for cache in config.cache:
            if cache.size is not None:
                remember_size(cache.path, cache.size.resolve(0))
    if foreground:
        daemon.run(config)
        return
    pid = launch.start(config, environ)
    click.echo(f"dmfs: {printable(config.source)} is mounted at {printable(config.mountpoint)} (pid {pid})")


def _become(name: str, where: str) -> None:
    """Go on as the user whom the mount is for: what he may not read or write is no use to his daemon either."""
    if os.geteuid() != 0:
        raise ConfigError(
            f"{where}: only root can mount for the user {name}: leave it out, or run the command as root (sudo)"
        )
    try:
        privileges.become(privileges.find_account(name))
        is_enough = privileges.has_sys_admin()
    except OSError:
        is_enough = False
    if not is_enough:
        raise FuseUnavailable(
            f"{where}: this root may not mount for the user {name}: "
            "it lacks one of the capabilities SYS_ADMIN, SETUID and SETGID, as in a container"
        )


def _print_plan(checked: checks.Checked, origins: dict[str, str]) -> None:
    config = checked.config
    click.echo("dmfs would mount")
    rows = [("source", printable(config.source)), ("mountpoint", printable(config.mountpoint))]
    name = "default cache" if checked.is_default_cache else "cache"
    rows += [(name, _describe(cache)) for cache in config.cache]
    for label, text in rows:
        click.echo(f"  {label:13}  {text}")
    changed = [name for name in MountConfig.model_fields if name in origins and _is_changed(config, name)]
    if changed:
        click.echo("with these settings")
        for name in changed:
            value = getattr(config, name)
            click.echo(f"  {name:17}  {printable(str(value)):20}  ({printable(origins[name])})")
    click.echo("Everything is in order. Nothing has been mounted.")


def _is_changed(config: MountConfig, name: str) -> bool:
    field = MountConfig.model_fields[name]
    return name not in ("source", "mountpoint", "cache") and getattr(config, name) != field.default


def _describe(cache: CacheConfig) -> str:
    room = disks.room(cache.path)
    size = "all that min_free leaves" if cache.size is None else amount(cache.size.resolve(room.total))
    on = disks.file_system(cache.path).name
    return f"{printable(cache.path)}, {size} of {amount(room.total)} ({on}, {amount(room.free)} free)"
