"""What LMCache's objects are called: by all that decides on their bytes."""

from __future__ import annotations

import pytest

from kvstore.connectors.lmcache.naming import (
    BYTES,
    NamedObject,
    layout_of,
    name_of,
    named_object,
    remote_key,
    remote_name,
)
from kvstore.errors import BadValue


def test_a_name_says_what_it_was_made_of() -> None:
    named = NamedObject(b"\x00\xff", "a/b", 7, 3, "salt", "float32:2x3")
    assert named_object(name_of(named, named.layout)) == named
    for wrong in (b"", b"a@b@c@d@e", b"a@x@y@zz@e@f", b"a@1@1@0@e@f@g", b"\xff"):
        with pytest.raises(BadValue, match="name"):
            named_object(wrong)


def test_layouts_as_text() -> None:
    assert layout_of([(2, 3), (4,)], ["torch.float32", "torch.int8"]) == "float32:2x3+int8:4"
    assert layout_of([], []) == BYTES
    assert layout_of([(9,), (8,)], ["torch.uint8"] * 2) == BYTES
    assert layout_of([(2, 4)], ["torch.uint8"]) == "uint8:2x4"


def test_tags_that_look_like_other_tags_are_others() -> None:
    names = {
        remote_name("m@1@0@ab@half@a%1@b%2", tags, "float32:2")
        for tags in ({"a": "1", "b": "2"}, {"a": "1@b%2"}, {"a": 1, "b": "2"})
    }
    assert len(names) == 3
    assert {remote_key(name) for name in names} == {"m@1@0@ab@half@a%1@b%2"}
    assert remote_name("m", {}, "float32:2") != remote_name("m", {}, "int32:2")
