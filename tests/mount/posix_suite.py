"""The POSIX suite: name -> check of a read-only view of the tree in tests/mount/posix/tree.py.

The same checks run over a native read-only bind mount, so that what they claim is true by construction, and over both
front ends of dmfs. Where a front end is allowed to answer otherwise, `ALLOWED_DEVIATIONS` says why and what it answers
instead; that is checked too, so a deviation that goes away is noticed.
"""

from typing import NamedTuple

from tests.mount.posix.attributes import (
    attributes,
    extended_attributes_are_not_offered,
    fields_of_the_root_but_its_number,
)
from tests.mount.posix.mapping import copy_file_range_is_refused, mapping, page_behind_a_truncated_end_is_kept
from tests.mount.posix.names import names
from tests.mount.posix.reads import reads
from tests.mount.posix.target import Check
from tests.mount.posix.writes import writes
from tests.support.mounts import WAYS

TARGETS = ["native", *WAYS]

CHECKS: dict[str, Check] = {**reads, **mapping, **names, **attributes, **writes}


class Deviation(NamedTuple):
    """Why a target answers otherwise, and the check of what it does answer."""

    reason: str
    check: Check


_EVERY_WAY = {
    "extended_attributes": Deviation(
        "without --allow-other extended attributes are not offered", extended_attributes_are_not_offered
    ),
    "copy_by_copy_file_range": Deviation(
        "the kernel refuses copy_file_range between types of file systems", copy_file_range_is_refused
    ),
    "page_behind_a_truncated_end": Deviation(
        "a reader keeps the version it opened, a copy of its own", page_behind_a_truncated_end_is_kept
    ),
}

ALLOWED_DEVIATIONS: dict[str, dict[str, Deviation]] = {
    **dict.fromkeys(WAYS, _EVERY_WAY),
    "native": {},
    "pyfuse3": _EVERY_WAY
    | {"fields_of_the_root": Deviation("libfuse numbers the root 1", fields_of_the_root_but_its_number)},
}
