"""Which mode is chosen, and the words for it."""

from types import SimpleNamespace
from typing import Any

import pytest

from dmfs.errors import FuseUnavailable
from dmfs.fuse.io_mode import choose


def tried(refusal: str | None = None, **refused_tiers: str) -> Any:
    """A `Passthrough` that has tried the tiers."""
    return SimpleNamespace(refusal=refusal, refused_tiers=refused_tiers)


def test_auto_takes_passthrough_where_it_can() -> None:
    assert choose("auto", tried(), can_omit_open=True) == ("passthrough", "the kernel reads local copies itself")
    name, reason = choose("passthrough", tried(None, slow="it is odd"), can_omit_open=True)
    assert (name, reason.endswith("those on slow are read by messages: it is odd")) == ("passthrough", True)


def test_auto_says_why_not() -> None:
    assert choose("auto", tried("too old"), can_omit_open=True) == ("pagecache", "no passthrough: too old")
    assert choose("auto", tried("too old"), can_omit_open=False).name == "plain"


def test_what_is_asked_for_is_had_or_refused() -> None:
    assert choose("pagecache", None, can_omit_open=True).name == "pagecache"
    assert choose("plain", None, can_omit_open=True).name == "plain"
    with pytest.raises(FuseUnavailable, match=r"too old.*--io auto"):
        choose("passthrough", tried("too old"), can_omit_open=True)
    with pytest.raises(FuseUnavailable, match="pagecache"):
        choose("pagecache", None, can_omit_open=False)
