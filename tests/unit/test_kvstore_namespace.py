"""Namespaces: injective ids, byte arithmetic of parts, and refusals that name the field."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore import limits
from kvstore.errors import BadValue, LayoutMismatch
from kvstore.namespace import (
    DTYPE_BYTES,
    NAME_PART,
    NAME_PART_BYTES,
    Attention,
    CacheGroup,
    Content,
    FieldValue,
    Layout,
    Namespace,
    check_part_sizes,
    content_id,
    encode_fields,
    namespace_id,
    opaque,
    open_layout,
)
from tests.unit.golden_vectors import GQA, MIXED, MLA

leaves = st.one_of(
    st.text(max_size=3), st.integers(-(1 << 63), (1 << 63) - 1), st.binary(max_size=3)
)
values = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3), max_leaves=6)
named = st.lists(st.tuples(st.text(max_size=3), values), max_size=4)
Fields = list[tuple[str, FieldValue]]


@given(st.binary(max_size=3), named, st.binary(max_size=3), named)
def test_the_encoding_of_fields_is_injective(
    tag: bytes, one: Fields, other_tag: bytes, other: Fields
) -> None:
    same = encode_fields(tag, one) == encode_fields(other_tag, other)
    assert same == (tag == other_tag and one == other)


# Pairs that an encoding without lengths or kinds would confuse.
NEAR: list[tuple[Fields, Fields]] = [
    ([("a", "bc")], [("ab", "c")]),
    ([("a", "b"), ("c", "d")], [("a", "bc"), ("", "d")]),
    ([("a", "1")], [("a", b"1")]),
    ([("a", 1)], [("a", True + 1)]),
    ([("a", ["b", "c"])], [("a", ["bc"])]),
    ([("a", [["b"], "c"])], [("a", [["b", "c"]])]),
    ([("a", []), ("b", [])], [("a", [[]])]),
    ([("a", "")], [("a", [])]),
    ([("a", "b")], [("a", "b"), ("", "")]),
]


@pytest.mark.parametrize(("one", "other"), NEAR)
def test_near_misses_differ(one: Fields, other: Fields) -> None:
    assert encode_fields(b"t", one) != encode_fields(b"t", other)


texts = st.sampled_from(["", "a", "b", "ab"])
groups = st.builds(
    CacheGroup,
    st.sampled_from(Attention),
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(0, 1),
    st.integers(0, 1),
)
contents = st.builds(
    Content,
    *[texts] * 5,
    st.lists(groups, max_size=2).map(tuple),
    texts,
    texts,
    st.integers(1, 2),
)
layouts = st.builds(Layout, st.integers(1, 2), st.integers(1, 2), st.integers(1, 2), texts, texts)


@given(contents, layouts, contents, layouts)
def test_ids_are_equal_only_for_equal_values(
    content: Content, layout: Layout, other: Content, other_layout: Layout
) -> None:
    assert (content_id(content) == content_id(other)) == (content == other)
    same = (content, layout) == (other, other_layout)
    assert (namespace_id(content, layout) == namespace_id(other, other_layout)) == same


@pytest.mark.parametrize("field", [f.name for f in msgspec.structs.fields(Content)])
def test_every_field_of_the_content_counts(field: str) -> None:
    old = getattr(GQA, field)
    new = {str: lambda: old + "x", int: lambda: old + 1, tuple: lambda: old * 2}[type(old)]()
    changed = msgspec.structs.replace(GQA, **{field: new})
    assert content_id(changed) != content_id(GQA)
    assert namespace_id(changed, Layout()) != namespace_id(GQA, Layout())


@pytest.mark.parametrize("field", [f.name for f in msgspec.structs.fields(Layout)])
def test_every_field_of_the_layout_counts(field: str) -> None:
    old = getattr(Layout(), field)
    changed = msgspec.structs.replace(Layout(), **{field: old + type(old)(1)})
    assert namespace_id(GQA, changed) != namespace_id(GQA, Layout())


valid_groups = st.one_of(
    st.builds(
        CacheGroup,
        st.just(Attention.FULL),
        st.integers(1, 80),
        st.integers(1, 16),
        st.integers(1, 256),
        st.integers(0, 256),
    ),
    st.builds(
        CacheGroup,
        st.just(Attention.LATENT),
        st.integers(1, 80),
        st.just(1),
        st.integers(1, 576),
        st.just(0),
    ),
)


def open_or_refuse(content: Content, layout: Layout) -> Namespace | None:
    """The namespace; None where the two do not fit each other, which only the layout can mend."""
    try:
        return open_layout(content, layout)
    except BadValue as error:
        if not error.field.startswith("layout"):
            raise
        return None


@given(
    st.lists(valid_groups, min_size=1, max_size=3),
    st.sampled_from(sorted(DTYPE_BYTES)),
    st.builds(
        Layout,
        st.sampled_from([1, 16, 64, 4096, 65_536]),
        st.integers(1, 8),
        st.integers(1, 4),
    ),
)
def test_parts_cover_every_layer_and_head_once(
    cache_groups: list[CacheGroup], dtype: str, layout: Layout
) -> None:
    content = Content("t", "m", "", "", dtype, tuple(cache_groups), "")
    namespace = open_or_refuse(content, layout)
    if namespace is None:
        return
    assert [part.index for part in namespace.parts] == list(range(len(namespace.parts)))
    for number, group in enumerate(cache_groups):
        parts = [part for part in namespace.parts if part.group == number]
        cells = [
            (layer, head)
            for part in parts
            for layer in range(part.layer_start, part.layer_stop)
            for head in range(part.head_start, part.head_stop)
        ]
        assert len(cells) == len(set(cells)) == group.layers * group.kv_heads
        token_bytes = (group.key_dim + group.value_dim) * DTYPE_BYTES[dtype]
        total = len(cells) * layout.page_tokens * token_bytes
        assert sum(part.size_bytes for part in parts) == total
    assert all(0 < part.size_bytes <= limits.CHUNK_BYTES for part in namespace.parts)
    assert namespace.page_bytes == sum(part.size_bytes for part in namespace.parts)


def test_known_models_have_known_sizes() -> None:
    # Llama 3.1 8B: 64 tokens x 32 layers x 8 heads x (128 + 128) x 2 bytes = 8 MiB.
    assert open_layout(GQA, Layout()).page_bytes == 8 * limits.MIB
    assert [p.size_bytes for p in open_layout(GQA, Layout(tensor_parallel=4)).parts] == [
        2 * limits.MIB
    ] * 4
    # Sixteen ranks share eight heads in pairs: stored once.
    assert len(open_layout(GQA, Layout(tensor_parallel=16)).parts) == 8
    # MLA: one copy for all ranks, 64 x 61 x 576 bytes.
    mla = open_layout(MLA, Layout(tensor_parallel=8))
    assert [part.size_bytes for part in mla.parts] == [64 * 61 * 576]
    assert len(open_layout(MIXED, Layout(pipeline_parallel=2)).parts) == 4


def test_a_page_larger_than_a_chunk_is_cut_by_layers() -> None:
    namespace = open_layout(GQA, Layout(page_tokens=4096))
    assert len(namespace.parts) > 1
    assert max(part.size_bytes for part in namespace.parts) <= limits.CHUNK_BYTES
    assert namespace.page_bytes == 64 * 8 * limits.MIB


FULL = CacheGroup(Attention.FULL, 32, 8, 128, 128)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tenant": ""}, "content.tenant"),
        ({"tenant": "x" * 513}, "content.tenant"),
        ({"model": ""}, "content.model"),
        ({"salt": "é" * 257}, "content.salt"),
        ({"schema_version": 2}, "content.schema_version"),
        ({"kv_dtype": "float64"}, "content.kv_dtype"),
        ({"groups": ()}, "content.groups"),
        ({"groups": (CacheGroup(Attention.FULL, 0, 8, 128, 128),)}, "content.groups[0].layers"),
        ({"groups": (FULL, CacheGroup(Attention.OPAQUE, 0, 0, 0, 0))}, "content.groups[1]"),
        ({"groups": (CacheGroup(Attention.LATENT, 1, 2, 5, 0),)}, "content.groups[0]"),
        ({"groups": (CacheGroup(Attention.SLIDING, 1, 1, 5, 5),)}, "content.groups[0].window"),
        ({"groups": (CacheGroup(Attention.FULL, 1, 1, 5, 5, 9),)}, "content.groups[0].window"),
        ({"groups": (CacheGroup(Attention.SLIDING, 1, 1, 5, 5, 1 << 63),)}, "content.groups[0].w"),
        ({"groups": (CacheGroup(Attention.OPAQUE, 1 << 63, 0, 0, 0),)}, "content.groups[0]"),
        ({"groups": (FULL,) * 1025}, "content.groups"),
        ({"groups": (CacheGroup(Attention.FULL, 1, 1, -5, 5),)}, "content.groups[0].key_dim"),
        ({"groups": (CacheGroup(Attention.FULL, 1, 1, 5, 1 << 21),)}, "content.groups[0].value"),
    ],
)
def test_bad_contents_are_refused_by_name(changes: dict[str, object], field: str) -> None:
    content = msgspec.structs.replace(GQA, **changes)
    with pytest.raises(BadValue) as caught:
        open_layout(content, Layout())
    assert caught.value.field.startswith(field)


@pytest.mark.parametrize(
    ("layout", "field"),
    [
        (Layout(page_tokens=0), "layout.page_tokens"),
        (Layout(page_tokens=65_536), "layout.page_tokens"),
        (Layout(tensor_parallel=3), "layout.tensor_parallel"),
        (Layout(tensor_parallel=0), "layout.tensor_parallel"),
        (Layout(pipeline_parallel=33), "layout.pipeline_parallel"),
        (Layout(pipeline_parallel=-1), "layout.pipeline_parallel"),
        (Layout(order="x" * 513), "layout.order"),
        (Layout(engine="x" * 513), "layout.engine"),
    ],
)
def test_bad_layouts_are_refused_by_name(layout: Layout, field: str) -> None:
    with pytest.raises(BadValue) as caught:
        open_layout(GQA, layout)
    assert caught.value.field == field


def test_too_many_parts_are_refused() -> None:
    many = (CacheGroup(Attention.FULL, 1, 1000, 1, 1),) * 2
    content = Content("t", "m", "", "", "int8", many, "")
    with pytest.raises(BadValue, match="parts a page"):
        open_layout(content, Layout(tensor_parallel=1000))


wild = st.sampled_from([-(1 << 63), -1, 0, 1, 2, 1 << 20, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
wild_groups = st.builds(CacheGroup, st.sampled_from(Attention), wild, wild, wild, wild, wild)


@given(
    st.builds(
        Content,
        *[texts] * 4,
        st.sampled_from(["int8", "opaque"]),
        st.lists(wild_groups, max_size=3).map(tuple),
        texts,
        texts,
        st.just(1),
    ),
    st.builds(Layout, wild, wild, wild, texts, texts),
)
def test_whatever_a_peer_sends_has_an_id_or_is_refused(content: Content, layout: Layout) -> None:
    try:
        namespace = open_layout(content, layout)
    except BadValue:
        return
    assert len(namespace.id) == len(namespace.content_id) == 32


def test_sizes_that_differ_from_the_layout_are_refused_with_both_numbers() -> None:
    namespace = open_layout(GQA, Layout(tensor_parallel=4))
    check_part_sizes(namespace, [0, 3], [2 * limits.MIB] * 2)
    with pytest.raises(LayoutMismatch, match="got 5 bytes, layout gives 2097152 bytes"):
        check_part_sizes(namespace, [1], [5])
    with pytest.raises(BadValue, match="part: got 4"):
        check_part_sizes(namespace, [4], [5])
    with pytest.raises(BadValue, match="part_bytes"):
        check_part_sizes(namespace, [1], [])


def test_opaque_objects_have_any_size_up_to_a_chunk() -> None:
    namespace = opaque("t", "objects")
    assert namespace.is_opaque
    assert namespace.parts == ()
    assert namespace.id != opaque("t", "objects", "salt").id
    assert (namespace.keeps_names, namespace.parts_a_page) == (False, 1)
    check_part_sizes(namespace, [0, 17], [1, limits.CHUNK_BYTES])
    for size in (0, -1, limits.CHUNK_BYTES + 1):
        with pytest.raises(BadValue, match="part_bytes"):
            check_part_sizes(namespace, [0], [size])


def test_an_object_whose_name_is_kept_has_it_for_a_second_part() -> None:
    named = opaque("t", "objects", keeps_names=True)
    assert named.id != opaque("t", "objects").id
    assert (named.keeps_names, named.parts_a_page) == (True, 2)
    check_part_sizes(named, [0, NAME_PART], [5, NAME_PART_BYTES])
    with pytest.raises(LayoutMismatch, match="a name: got 5 bytes, want 1024 bytes"):
        check_part_sizes(named, [0, NAME_PART], [5, 5])
    layered = open_layout(GQA, Layout(order="named"))
    assert not layered.keeps_names
    assert layered.parts_a_page == len(layered.parts)
