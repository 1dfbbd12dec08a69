"""Where the settings of a mount come from: defaults < YAML file < `DMFS_*` variables < flags.

Every value remembers its origin, so that a refusal can name the file and line, the variable or the flag. Paths are made
absolute here, without touching them; checks.py resolves links and looks at what is there.
"""

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import yaml
from pydantic import ValidationError

from dmfs import privileges
from dmfs.config import CacheConfig, MountConfig, Size, split_cache
from dmfs.errors import ConfigError
from dmfs.types import MiB

MAX_CONFIG_FILE = 1 * MiB  # a file of settings is a page; more is the wrong file

FLAGS = {
    "source": "SOURCE",
    "mountpoint": "MOUNTPOINT",
    "cache": "--cache",
    "immutable": "--immutable",
    "metadata_ttl": "--metadata-ttl",
    "allow_other": "--allow-other",
    "user": "--user",
    "dataset_id": "--dataset-id",
    "front_end": "--front-end",
    "io": "--io",
    "readahead": "--readahead",
    "log_file": "--log-file",
    "verbose": "--verbose",
}
"""The command-line name of each setting that has one."""


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return f"DMFS_{name.upper()}"


class Value(NamedTuple):
    """A value as it was given, and where: `origins` has one text for the whole and, for a list, one for each item."""

    value: object
    origins: tuple[str, ...]


class Settings(NamedTuple):
    """Valid settings and, for each one given, a text that says where: "dmfs.yaml line 3", "DMFS_FILLS", "--cache"."""

    config: MountConfig
    origins: dict[str, str]


def _from_cache(value: object, base: str, home: str) -> object:
    """An item of `cache` as a mapping with an absolute path, as far as it can be one."""
    item = split_cache(value) if isinstance(value, str) else value
    if not isinstance(item, dict):
        raise ValueError("it should be PATH or PATH:SIZE")
    return {**item, "path": _join(base, item["path"], home)} if "path" in item else item


def _join(base: str, path: object, home: str) -> object:
    if not isinstance(path, str):
        return path
    if not path or "\0" in path:
        raise ValueError("it should be a path")
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError("it should be a path in UTF-8") from None
    if path == "~" or path.startswith("~/"):
        path = home + path[1:]
    return os.path.join(base, path)  # no normpath: "link/.." is not "."


_PATHS = ("source", "mountpoint", "log_file")


def _prepare(name: str, given: Value, base: str, home: str) -> object:
    """What the model is to validate: paths absolute, caches as mappings. Raises ConfigError."""
    item: object = given.value
    where = given.origins[0]
    try:
        if name in _PATHS:
            return _join(base, item, home)
        if name != "cache":
            return item
        if not isinstance(item, Sequence) or isinstance(item, str):
            raise ValueError("it should be a list of PATH or PATH:SIZE")
        caches = []
        for where, item in zip(given.origins[1:], list(item), strict=True):  # noqa: B007, B020 - a refusal names them
            caches.append(_from_cache(item, base, home))
        return caches
    except ValueError as exc:
        raise ConfigError(_refusal(where, name, item, str(exc))) from None


def _find_account(given: Value) -> privileges.Account | None:
    """The user whom the mount is for. Raises ConfigError."""
    value = given.value
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None  # the model refuses it
    try:
        return privileges.find_account(str(value))
    except ValueError as exc:
        raise ConfigError(_refusal(given.origins[0], "user", value, str(exc))) from None


def _refusal(where: str, name: str, value: object, reason: str) -> str:
    return f"{where}: {name} cannot be {value!r}: {reason}"


def load_settings(flags: Mapping[str, object], *, config_file: str | None, environ: Mapping[str, str]) -> Settings:
    """Gather the settings of a mount.

    Args:
        flags: by the names of `MountConfig`; None and () mean that the flag was not given. Caches are PATH[:SIZE].
        config_file: a YAML file; its relative paths are relative to its own folder.
        environ: those other than `DMFS_<SETTING>` are ignored, as other programs may use the prefix; so are empty ones.

    Raises:
        ConfigError: one sentence that says where the fault is.
    """
    cwd = os.getcwd()
    given: dict[str, tuple[Value, str]] = {}
    if config_file is not None:
        base = os.path.dirname(os.path.join(cwd, config_file))
        given |= {name: (value, base) for name, value in read_yaml(config_file).items()}
    for name in MountConfig.model_fields:
        text = environ.get(variable(name))
        if text:
            items: object = [part for part in text.split(",") if part] if name == "cache" else text
            given[name] = (_given(items, variable(name)), cwd)
        if flags.get(name) not in (None, ()):
            given[name] = (_given(flags[name], FLAGS.get(name, name)), cwd)

    account = _find_account(given["user"][0]) if "user" in given else None
    home = account.home if account else os.path.expanduser("~")
    prepared = {name: _prepare(name, value, base, home) for name, (value, base) in given.items()}
    if account:
        prepared["user"] = account.name
    try:
        config = MountConfig.model_validate(prepared)
    except ValidationError as exc:
        error = exc.errors()[0]
        name = str(error["loc"][0])
        if error["type"] == "missing" and len(error["loc"]) == 1:
            raise ConfigError(
                f"no {name} is given: write dmfs mount SOURCE MOUNTPOINT, or {name}: in the file"
            ) from None
        origins = given[name][0].origins
        index = error["loc"][1] if len(error["loc"]) > 1 else None
        where = origins[index + 1] if isinstance(index, int) else origins[0]
        raise ConfigError(_explain(where, error)) from None
    return Settings(config, {name: value.origins[0] for name, (value, _) in given.items()})


def _given(value: object, origin: str) -> Value:
    count = len(value) if isinstance(value, list | tuple) else 0
    return Value(value, (origin,) * (count + 1))


def _explain(where: str, error: Any) -> str:
    """The sentence for one error of pydantic's."""
    names = [str(part) for part in error["loc"] if isinstance(part, str)]
    if error["type"] == "missing":
        return f"{where}: {names[-1]} is missing in {names[0]}"
    if error["type"] == "extra_forbidden":
        return f"{where}: unknown setting {names[-1]!r} in {names[0]}; it takes path and size"
    value, name = error["input"], ".".join(names)
    reason = re.sub(r"^(Input|String|Value)\b", "it", error["msg"].removeprefix("Value error, "))
    if isinstance(value, list | tuple | dict):
        return f"{where}: {name}: {reason}"
    return _refusal(where, name, str(value) if isinstance(value, Size) else value, reason)


def read_yaml(path: str) -> dict[str, Value]:
    """The settings in a YAML file: a flat mapping of the names of `MountConfig`. Values are not looked at here.

    Raises:
        ConfigError: the file is not readable, not YAML, or has an unknown or repeated setting; with the line.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_CONFIG_FILE + 1)
    except OSError as exc:
        raise ConfigError(f"{path}: the configuration file cannot be read: {exc.strerror}") from None
    if len(text) > MAX_CONFIG_FILE:
        raise ConfigError(f"{path}: this is no configuration file, it is larger than {MAX_CONFIG_FILE} bytes")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        if root is None or root.tag == "tag:yaml.org,2002:null":
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{_line(path, root)}: the file should be lines such as fills: 8")
        return {key: _value(path, node) for key, node in _items(path, root, set(MountConfig.model_fields)).items()}
    except yaml.MarkedYAMLError as exc:
        line = f" line {exc.problem_mark.line + 1}" if exc.problem_mark else ""
        raise ConfigError(f"{path}{line}: this is not YAML: {exc.problem or exc.context}") from None
    except yaml.reader.ReaderError as exc:
        number = text[: exc.position].count(b"\n") + 1
        raise ConfigError(f"{path} line {number}: this is not YAML: {exc.reason}") from None
    except RecursionError:
        raise ConfigError(f"{path}: this is no configuration file, it is nested too deep") from None


def _line(name: str, node: yaml.Node) -> str:
    return f"{name} line {node.start_mark.line + 1}"


def _items(name: str, mapping: yaml.MappingNode, known: set[str]) -> dict[str, yaml.Node]:
    """The keys of a mapping, each known and there once."""
    items: dict[str, yaml.Node] = {}
    for key, node in mapping.value:
        text = key.value if isinstance(key, yaml.ScalarNode) else None
        if text is None or text not in known:
            close = difflib.get_close_matches(str(text), sorted(known), n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; the settings are {', '.join(sorted(known))}"
            raise ConfigError(f"{_line(name, key)}: unknown setting {str(text)!r}{hint}")
        if text in items:
            raise ConfigError(f"{_line(name, key)}: {text} is set a second time")
        items[text] = node
    return items


def _value(name: str, node: yaml.Node) -> Value:
    nodes = [node, *(node.value if isinstance(node, yaml.SequenceNode) else ())]
    for part in nodes:
        if isinstance(part, yaml.MappingNode):
            _items(name, part, set(CacheConfig.model_fields))
    try:
        value = yaml.constructor.SafeConstructor().construct_object(node, deep=True)
    except ValueError as exc:  # such as a date that does not exist
        raise ConfigError(f"{_line(name, node)}: this is not YAML: {exc}") from None
    return Value(value, tuple(_line(name, part) for part in nodes))
