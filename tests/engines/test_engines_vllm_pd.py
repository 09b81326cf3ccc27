"""Prompts that one vLLM server computes and others go on from, through tickets and a gateway."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest

from tests.cluster.servers import until
from tests.cluster.up import remove_segments
from tests.engines.models import make_model, text
from tests.engines.vllm_engine import BLOCK, VllmEngine
from tests.engines.vllm_fleet import END, VllmFleet, give_words

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PREFILL, DECODES = "prefill-0", ("decode-1", "decode-2")
TOKENS = 24
LONG = 300
PROMPTS = [text(300 + 7 * n, seed=n) for n in range(8)]
"""None ends with a full block: its tail is computed again by who goes on."""
WAIT_S = 120.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_model("grouped", tmp_path_factory.mktemp("model"))
    give_words(made)
    return made


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What one engine without a pool answers to each prompt."""
    with VllmEngine(model, folder=tmp_path_factory.mktemp("alone")) as engine:
        return [words(each) for each in engine.generate(PROMPTS, LONG).tokens]


@pytest.fixture(scope="module")
def fleet(
    model: Path, alone: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[VllmFleet]:
    del alone  # before: its engine has ended when the others start
    folder, roles = tmp_path_factory.mktemp("fleet"), ("prefill", "decode", "decode")
    try:
        with VllmFleet(folder, model, *roles) as made:
            yield made
    finally:
        remove_segments(folder / "pool")


def words(tokens: list[int]) -> str:
    kept = tokens[: tokens.index(END)] if END in tokens else tokens
    return " ".join(f"w{each}" for each in kept)


def same(said: str, expected: str, tokens: int) -> bool:
    return said.split() == expected.split()[:tokens]


def body(number: int, tokens: int = TOKENS) -> dict[str, Any]:
    return {"prompt": PROMPTS[number], "max_tokens": tokens, "temperature": 0}


def loaded(fleet: VllmFleet) -> float:
    """Pages that the servers which answer have had from the pool."""
    return sum(fleet.metric(name, "vllm:kvharbor_loaded_pages_total") for name in DECODES)


def is_idle(fleet: VllmFleet) -> bool:
    return not any(fleet.metric(name, "vllm:num_requests_running") for name in fleet.servers)


def test_answers_are_those_of_one_engine(fleet: VllmFleet, alone: list[str]) -> None:
    before = loaded(fleet)
    with ThreadPoolExecutor(4) as threads:
        answers = list(
            threads.map(lambda number: fleet.ask("/v1/completions", body(number)), range(4))
        )
    for number, (status, said) in enumerate(answers):
        assert status == 200, said
        assert same(said["choices"][0]["text"], alone[number], TOKENS), (number, said)
    # Every full block of every prompt came from the pool.
    blocks = sum(len(PROMPTS[number]) // BLOCK for number in range(4))
    until("they are counted", lambda: loaded(fleet) == before + blocks, WAIT_S)
    fleet.await_idle()


def test_a_stream_and_a_chat_are_told_on_as_they_come(fleet: VllmFleet, alone: list[str]) -> None:
    with fleet.stream("/v1/completions", body(0)) as asked:
        pieces = list(asked.pieces())
    assert len([each for each in pieces if each]) == TOKENS
    assert same("".join(pieces), alone[0], TOKENS)
    content = " ".join(f"w{each}" for each in PROMPTS[1])
    chat = {"messages": [{"role": "user", "content": content}], "max_tokens": 5, "temperature": 0}
    status, said = fleet.ask("/v1/chat/completions", chat)
    assert status == 200, said
    assert said["usage"]["prompt_tokens"] == len(content.split()), said
    fleet.await_idle()


def test_another_proxy_may_hand_over_by_the_parameters_alone(
    fleet: VllmFleet, alone: list[str]
) -> None:
    """As vLLM's own examples of proxies do: what one server answers is sent on as it is."""
    common = {"prompt": PROMPTS[4], "temperature": 0, "ignore_eos": True}
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None}
    first = fleet.ask_server(PREFILL, max_tokens=1, kv_transfer_params=asked, **common)
    params = first["kv_transfer_params"]
    assert params["do_remote_prefill"]
    before = loaded(fleet)
    second = fleet.ask_server(
        DECODES[0], max_tokens=TOKENS, kv_transfer_params=params, return_token_ids=True, **common
    )
    assert same(words(second["choices"][0]["token_ids"]), alone[4], TOKENS)
    blocks = len(PROMPTS[4]) // BLOCK
    until("they are counted", lambda: loaded(fleet) == before + blocks, WAIT_S)


def test_a_client_that_hangs_up_frees_everything(fleet: VllmFleet) -> None:
    with fleet.stream("/v1/completions", body(5, 600)) as asked:
        next(asked.pieces())
    fleet.await_idle()
    until("vLLM has ended it", lambda: is_idle(fleet), WAIT_S)


def test_an_answer_survives_its_servers_and_new_ones_come(
    fleet: VllmFleet, alone: list[str]
) -> None:
    # In the middle of an answer its decode server is killed: another one goes on.
    with fleet.stream("/v1/completions", body(6, LONG)) as asked:
        pieces = asked.pieces()
        told = [next(pieces)]
        (row,) = fleet.tickets().rows
        assert row.decode in DECODES
        fleet.kill_server(row.decode)
        # And then the one that has computed the prompt, which nobody needs any more.
        fleet.kill_server(PREFILL)
        told += list(pieces)
    assert same("".join(told), alone[6], LONG)
    fleet.await_idle()
    # Agents end with their servers, and the fleet knows.
    for name in (row.decode, PREFILL):
        fleet.processes[name].wait(WAIT_S)
    status, said = fleet.ask("/v1/completions", body(7))
    assert (status, said["error"]["code"]) == (429, "no_prefill"), said
    fleet.start(PREFILL, "prefill")
    fleet.await_agent(PREFILL)
    status, said = fleet.ask("/v1/completions", body(7))
    assert status == 200, said
    assert same(said["choices"][0]["text"], alone[7], TOKENS)
    fleet.await_idle()
