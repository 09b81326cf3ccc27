"""A claimed ticket against what its decode worker knows: each field wrong in turn."""

from __future__ import annotations

import msgspec
import pytest

from kvstore.block_hashes import SHA256_CBOR, VLLM_SEED, Hashing, chain_of
from kvstore.client.descriptor import check_descriptor
from kvstore.errors import BadValue
from kvstore.ids import KEY_BYTES
from kvstore.namespace import tails
from kvstore.page import PageChain
from kvstore.wire.messages.tickets import TailRef, TicketClaimed
from tests.unit.client_scripts import PAGE_TOKENS, opened
from tests.unit.replaced import replaced

SPACE = opened().namespace
PROMPT = tuple(range(10))
CHAIN = PageChain.of_tokens(SPACE.id, PROMPT, PAGE_TOKENS)
TOKEN_BYTES = SPACE.page_bytes // PAGE_TOKENS
TAIL = TailRef(tails("tests").id, bytes(KEY_BYTES), 2 * TOKEN_BYTES)
GOOD = TicketClaimed(1 << 32, SPACE.id, PAGE_TOKENS, 10, CHAIN.packed, TAIL, (7,))


def changed(**fields: object) -> TicketClaimed:
    return msgspec.structs.replace(GOOD, **fields)


def test_a_prompt_of_two_pages_has_two_tokens_in_its_tail() -> None:
    assert check_descriptor(GOOD, SPACE, PROMPT) == 2


def test_without_a_tail_its_tokens_are_computed_again() -> None:
    assert check_descriptor(changed(tail=TailRef()), SPACE, PROMPT) == 0


def test_pages_that_the_pool_did_not_take_are_computed_again() -> None:
    fewer = changed(keys=CHAIN.packed[:KEY_BYTES], tail=TailRef())
    assert check_descriptor(fewer, SPACE, PROMPT) == 0
    with pytest.raises(BadValue, match=r"^tail\.key: .*6 tokens lie behind the last page"):
        check_descriptor(changed(keys=CHAIN.packed[:KEY_BYTES]), SPACE, PROMPT)


def test_pages_of_generated_tokens_follow_those_of_the_prompt() -> None:
    """13 of 14 tokens are computed: the last one is what to go on from."""
    generated = (7, 8, 9, 10)
    chain = PageChain.of_tokens(SPACE.id, (*PROMPT, *generated), PAGE_TOKENS)
    shed = replaced(GOOD, "tail.size_bytes", TOKEN_BYTES)
    shed = msgspec.structs.replace(shed, keys=chain.packed, tokens=generated)
    assert check_descriptor(shed, SPACE, PROMPT, (7, 8)) == 1
    assert check_descriptor(shed, SPACE, PROMPT, (*generated, 11)) == 1
    with pytest.raises(BadValue, match=r"^keys: "):
        check_descriptor(msgspec.structs.replace(shed, tokens=(7, 6, 9, 10)), SPACE, PROMPT)


def test_a_whole_page_needs_no_tail() -> None:
    prompt = PROMPT[:8]
    whole = changed(prompt_tokens=8, tail=TailRef())
    assert check_descriptor(whole, SPACE, prompt) == 0
    with pytest.raises(BadValue, match=r"^tail\.key: "):
        check_descriptor(changed(prompt_tokens=8), SPACE, prompt)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("token", 0),
        ("namespace", bytes(KEY_BYTES)),
        ("page_tokens", 8),
        ("prompt_tokens", 11),
        ("keys", CHAIN.packed[:-1]),
        ("keys", CHAIN.packed[KEY_BYTES:]),
        ("keys", CHAIN.packed + bytes(KEY_BYTES)),
        ("tail.namespace", tails("other").id),
        ("tail.key", b"short"),
        ("tail.size_bytes", 2 * TOKEN_BYTES - 1),
        ("tail.size_bytes", 3 * TOKEN_BYTES),
        ("tokens", ()),
        ("tokens", (8,)),
    ],
)
def test_a_wrong_field_is_named(field: str, value: object) -> None:
    with pytest.raises(BadValue, match=f"^{field}: got .*, want "):
        check_descriptor(replaced(GOOD, field, value), SPACE, PROMPT, (7, 8))


def test_bytes_of_a_tail_that_is_none_are_refused() -> None:
    with pytest.raises(BadValue, match=r"^tail\.size_bytes: "):
        check_descriptor(replaced(GOOD, "tail.key", b""), SPACE, PROMPT)


def test_another_prompt_has_other_pages() -> None:
    with pytest.raises(BadValue, match=r"^keys: "):
        check_descriptor(GOOD, SPACE, (1, *PROMPT[1:]))
    with pytest.raises(BadValue, match=r"^keys: "):
        check_descriptor(GOOD, SPACE, PROMPT, extra=b"a picture")


def test_pages_may_have_the_names_that_an_engine_gives_its_blocks() -> None:
    hashing = Hashing(SHA256_CBOR, VLLM_SEED)
    named = chain_of(SPACE, PROMPT, hashing)
    theirs = changed(keys=named.packed)
    assert check_descriptor(theirs, SPACE, PROMPT, hashing=hashing) == 2
    with pytest.raises(BadValue, match=r"^keys: "):
        check_descriptor(theirs, SPACE, PROMPT)
    with pytest.raises(BadValue, match=r"^keys: "):
        check_descriptor(GOOD, SPACE, PROMPT, hashing=hashing)
