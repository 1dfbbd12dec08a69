"""Runs every check of the POSIX suite over the native oracle and every way of dmfs, one test a check and target."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mount.posix.target import Target
from tests.mount.posix.tree import build
from tests.mount.posix_suite import ALLOWED_DEVIATIONS, CHECKS, TARGETS
from tests.support.mounts import MountFactory, read_only_bind, why_no_bind_mounts


@pytest.fixture(scope="session")
def tree(disk_path: Path) -> Path:
    """The dataset of the suite, built once."""
    root = disk_path / "posix"
    root.mkdir()
    build(root, TARGETS)
    return root


@pytest.fixture(scope="session")
def target(request: pytest.FixtureRequest, tree: Path, disk_path: Path) -> Iterator[Target]:
    """One mounted view of the tree for all checks."""
    scratch = disk_path / f"scratch-{request.param}"
    scratch.mkdir()
    with contextlib.ExitStack() as stack:
        if request.param == "native":
            if reason := why_no_bind_mounts():
                pytest.skip(reason)
            view = stack.enter_context(read_only_bind(tree))
        else:
            factory = stack.enter_context(contextlib.closing(MountFactory()))
            view = factory(tree, way=request.param).view
        yield Target(request.param, view, tree, scratch)


@pytest.mark.parametrize("target", TARGETS, indirect=True, scope="session")
@pytest.mark.parametrize("name", CHECKS)
def test_posix(name: str, target: Target) -> None:
    deviation = ALLOWED_DEVIATIONS[target.name].get(name)
    (deviation.check if deviation else CHECKS[name])(target)


def test_deviations_name_checks() -> None:
    assert set(ALLOWED_DEVIATIONS) == set(TARGETS)
    for target, deviations in ALLOWED_DEVIATIONS.items():
        unknown = set(deviations) - set(CHECKS)
        assert not unknown, f"{target} deviates from checks that do not exist: {unknown}"
