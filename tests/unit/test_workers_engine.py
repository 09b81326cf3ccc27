"""Requests in an engine: joining, leaving, room, and going on in another engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvstore.errors import BadValue, OutOfSpace
from tests.tiny_model import computed, greedy, same, text, tiny
from tests.unit.engine_runs import CAPACITY, CHUNK, alone, one_by_one, request, run
from workers.engine import Finish, chunk_end

MODEL = tiny()


def test_a_request_generates_what_a_plain_loop_does() -> None:
    asked = request("a", CHUNK - 2)
    expected, _ = greedy(MODEL, list(asked.tokens), computed(MODEL, []), asked.max_tokens)
    engine = one_by_one(MODEL)
    engine.add(asked)
    generated = run(engine)
    assert [one.token for one in generated] == expected
    assert [one.position for one in generated] == list(range(6, 12))
    assert [one.finish for one in generated] == [None] * 5 + [Finish.LENGTH]
    taken = generated[-1].taken
    assert taken is not None
    assert taken.tokens == (*asked.tokens, *expected)
    assert taken.max_tokens == 0
    assert taken.cache.get_seq_length() == len(taken.tokens) - 1


def test_a_prompt_takes_a_step_a_chunk_beside_running_requests() -> None:
    engine = one_by_one(MODEL)
    engine.add(request("short", 3, 10))
    assert [one.request_id for one in engine.step()] == ["short"]
    engine.add(request("long", 3 * CHUNK))
    names, waiting = [], []
    for _ in range(4):
        waiting.append(engine.waiting_tokens)
        names.append([one.request_id for one in engine.step()])
    assert names == [["short"], ["short"], ["long", "short"], ["short", "long"]]
    assert waiting == [3 * CHUNK, 2 * CHUNK, CHUNK, 0]


def test_a_stop_token_is_generated_and_ends_the_request() -> None:
    asked = request("a", 5)
    tokens = alone(MODEL, asked)
    stop = tokens[7]
    assert stop not in tokens[5:7]
    engine = one_by_one(MODEL)
    engine.add(replace(asked, stop=frozenset({stop})))
    generated = run(engine)
    assert [one.token for one in generated] == list(tokens[5:8])
    assert generated[-1].finish is Finish.STOP


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("steps", range(8))
def test_what_is_taken_out_goes_on_elsewhere_with_the_same_tokens(
    steps: int, temperature: float
) -> None:
    asked = request("a", 3 * CHUNK + 1, temperature=temperature, seed=11)
    one, other = one_by_one(MODEL), one_by_one(MODEL)
    one.add(asked)
    for _ in range(steps):
        one.step()
    taken = one.export("a")
    assert not one.running
    assert one.free_tokens == CAPACITY
    other.add(replace(asked, tokens=taken.tokens, max_tokens=taken.max_tokens), taken.cache)
    ended = run(other)[-1].taken
    assert ended is not None
    assert ended.tokens == alone(MODEL, asked)


def test_a_request_begins_with_the_kv_of_its_prompt() -> None:
    asked = request("a", 2 * CHUNK)
    tokens = alone(MODEL, asked)
    first = tokens[: 2 * CHUNK + 1]
    engine = one_by_one(MODEL)
    cache = computed(MODEL, list(asked.tokens[:CHUNK]))
    engine.add(replace(asked, tokens=first, max_tokens=5), cache)
    assert run(engine)[-1].position == len(tokens) - 1


def test_room_is_set_aside_until_a_request_leaves() -> None:
    engine = one_by_one(MODEL, capacity_tokens=30, rows_max=2)
    engine.add(request("a", 10, 5))
    assert (engine.free_tokens, engine.free_rows) == (15, 1)
    with pytest.raises(OutOfSpace, match="b wants 16 tokens and a row; 15 tokens and 1 rows"):
        engine.add(request("b", 10, 6))
    engine.add(request("b", 10, 5))
    with pytest.raises(OutOfSpace, match="0 tokens and 0 rows are free"):
        engine.add(request("c", 1, 1))
    assert engine.running == ("a", "b")
    assert engine.cancel("a")
    assert not engine.cancel("a")
    assert (engine.free_tokens, engine.free_rows) == (15, 1)
    run(engine)
    assert (engine.free_tokens, engine.free_rows) == (30, 2)


def test_the_youngest_leaves_when_others_outgrow_what_was_expected() -> None:
    """Outputs are ten times as long as was expected: all come to their end, one after another."""
    asked = [replace(request(name, 5 + i, 40), expected_tokens=4) for i, name in enumerate("abc")]
    engine = one_by_one(MODEL, capacity_tokens=60)
    waiting, left = list(asked), list[str]()
    ended: dict[str, tuple[int, ...]] = {}
    while waiting or engine.running:
        while waiting and waiting[0].room <= engine.free_tokens:
            engine.add(waiting.pop(0))
        while (crowded := engine.crowded_out()) is not None:
            assert crowded == engine.running[-1] != engine.running[0]
            left.append(crowded)
            taken = engine.export(crowded)
            same = next(each for each in asked if each.id == crowded)
            waiting.append(replace(same, tokens=taken.tokens, max_tokens=taken.max_tokens))
        for one in engine.step():
            if one.taken is not None:
                ended[one.request_id] = one.taken.tokens
        rows = engine._rows.values()  # noqa: SLF001  their KV is what is bounded
        assert sum(len(row.tokens) - 1 for row in rows) <= 60
    assert left
    assert ended == {each.id: alone(MODEL, each) for each in asked}


def test_a_request_that_would_never_fit_is_refused_as_such() -> None:
    engine = one_by_one(MODEL, capacity_tokens=30)
    with pytest.raises(BadValue, match=r"tokens: got 31, want at most 30 tokens"):
        engine.add(request("a", 10, 21))
    engine.add(request("a", 10, 20))
    with pytest.raises(BadValue, match="id: got 'a', want one that is not running"):
        engine.add(request("a", 1, 1))
    with pytest.raises(BadValue, match="request_id: got 'b', want one of"):
        engine.export("b")


def test_a_cache_of_all_tokens_leaves_nothing_to_compute_the_next_one_from() -> None:
    engine = one_by_one(MODEL)
    with pytest.raises(BadValue, match="cache: got '5 tokens', want fewer than 5"):
        engine.add(request("a", 5), computed(MODEL, text(5)))
    assert not engine.running


@pytest.mark.parametrize("steps", range(9))
def test_a_cancelled_request_leaves_nothing_and_disturbs_nobody(steps: int) -> None:
    kept, dropped = request("kept", 2 * CHUNK + 3), request("dropped", CHUNK + 1)
    engine = one_by_one(MODEL)
    engine.add(dropped)
    engine.add(kept)

    def cancel(done: int) -> None:
        if done == steps:
            engine.cancel("dropped")

    generated = run(engine, cancel)
    assert engine.free_tokens == CAPACITY
    (ended,) = [one.taken for one in generated if one.request_id == "kept" and one.taken]
    assert ended.tokens == alone(MODEL, kept)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"tokens": ()}, "tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"expected_tokens": 0}, "expected_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 63}, "seed"),
    ],
)
def test_a_request_that_no_engine_could_run_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(BadValue, match=f"^{text}: "):
        replace(request("a", 1), **fields)


@pytest.mark.parametrize("field", ["capacity_tokens", "rows_max", "chunk_tokens"])
def test_an_engine_without_room_is_refused(field: str) -> None:
    with pytest.raises(BadValue, match=f"{field}: got 0, want at least 1"):
        one_by_one(MODEL, **{field: 0})


@pytest.mark.parametrize(
    ("start", "end", "expected"), [(0, 3, 3), (0, 20, 8), (5, 20, 8), (8, 20, 16), (16, 20, 20)]
)
def test_chunks_end_at_multiples(start: int, end: int, expected: int) -> None:
    assert chunk_end(start, end, 8) == expected


def test_the_kv_of_an_ended_request_is_that_of_its_tokens() -> None:
    asked = request("a", 4, 1)
    engine = one_by_one(MODEL)
    engine.add(asked)
    taken = run(engine)[-1].taken
    assert taken is not None
    assert same(taken.cache, computed(MODEL, list(asked.tokens)))
