"""Prefill and decode workers behind a gateway: the answers of one process, whatever dies."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import pytest

from kvstore.exit_codes import ExitCode
from tests.cluster.servers import until
from tests.cluster.serving import WAIT_S, Asked, Fleet, secret_file
from tests.cluster.span_collector import SpanCollector
from tests.cluster.tiny_answers import alone, alone_tokens, in_pool
from tests.cluster.up import Up, kvharbor, remove_segments
from workers.gateway_lengths import LEAST
from workers.tracing import ENDPOINT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from opentelemetry.proto.trace.v1.trace_pb2 import Span

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

COMPLETIONS = "/v1/completions"
AHEAD: Final[dict[str, Any]] = {
    "config": "[master]\nroute_ahead = 1e6\n", "options": ("--layer-groups=2",),
}  # fmt: skip
"""Decode workers are chosen at once, and pull each group of layers as it is computed."""
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 5}


def prompt(number: int, length: int = 90) -> str:
    """Prompts of different lengths, of which every third begins alike."""
    words = f"chat {number % 3}: " + " ".join(str(i * (number % 3 + 3)) for i in range(length))
    return words[: length + number]


def body(text: str, tokens: int, **how: object) -> dict[str, Any]:
    return {"prompt": text, "max_tokens": tokens, "temperature": 0, **how}


def listens(where: str) -> bool:
    host, _, port = where.rpartition(":")
    with closing(socket.socket()) as sock:
        return not sock.connect_ex((host, int(port)))


def set_roles(fleet: Fleet, *policy: str) -> None:
    """Have the master move workers between roles so."""
    told = f"--master={fleet.up.master}", f"--secret-file={fleet.folder / 'secret'}"
    done = kvharbor("policy", "set", *told, "roles", *policy)
    assert done.returncode == ExitCode.OK, done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    remove_segments(tmp_path / "pool")


@pytest.fixture(scope="module")
def collector() -> Iterator[SpanCollector]:
    """Of the spans of that one."""
    with SpanCollector() as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENDPOINT, made.endpoint)
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield made


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, collector: SpanCollector) -> Iterator[Fleet]:
    """One for the tests that kill nothing."""
    folder = tmp_path_factory.mktemp("fleet")
    roles, secret = ("prefill", "decode", "decode"), secret_file(folder)
    options = ("--switch-roles", *AHEAD["options"])
    with Fleet(folder, *roles, options=options, secret=secret, config=AHEAD["config"]) as made:
        set_roles(made, "off")
        yield made
    remove_segments(folder / "pool")


def test_up_serves_a_model(folder: Path) -> None:
    options = ("--pd=1p2d", "--model=tiny", "--gateway=127.0.0.1:0", "--layer-groups=2")
    with Up(folder / "pool", *options, dram="256MiB", start_s=240) as up:
        serving = up.ready["serving"]
        assert [each["role"] for each in serving["workers"]] == [
            "prefill-1",
            "decode-1",
            "decode-2",
        ]
        where = serving["gateway"]["listen"]
        with urllib.request.urlopen(f"http://{where}/v1/models") as answer:
            (model,) = json.load(answer)["data"]
        chat = {"model": model["id"], "messages": [{"role": "user", "content": "Hello"}]}
        chat |= {"max_tokens": 12, "temperature": 0, "kvharbor_timings": True}
        with Asked(where, "/v1/chat/completions", chat, {"X-Request-Id": "mine"}) as asked:
            assert asked.response.headers["X-Request-Id"] == "mine"
            said = json.loads(asked.response.read())
        with Asked(where, "/v1/chat/completions", {**chat, "stream": True}, {}) as asked:
            events = list(asked.events())
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
        assert deltas[0]["role"] == "assistant"
        content = "".join(delta.get("content", "") for delta in deltas)
        assert content == said["choices"][0]["message"]["content"]
        assert said["usage"]["kvharbor_timings"]["routes"] == 1
        with urllib.request.urlopen(f"http://{where}/metrics") as answer:
            assert b'kvharbor_gateway_requests_total{end="complete"} 2.0' in answer.read()
        assert up.end() == (ExitCode.OK, "")


def test_a_shape_that_is_none_is_refused(folder: Path) -> None:
    done = kvharbor("up", f"--data-dir={folder}", "--pd=2d1p")
    assert done.returncode == ExitCode.USAGE, done
    assert "--pd: got '2d1p', want" in done.stderr


def test_answers_are_those_of_one_process(fleet: Fleet) -> None:
    asked = [(prompt(i), {} if i % 2 else SAMPLED) for i in range(9)]
    with ThreadPoolExecutor(9) as threads:
        answers = threads.map(lambda one: fleet.ask(COMPLETIONS, body(one[0], 24, **one[1])), asked)
        for (text, how), (status, said) in zip(asked, answers, strict=True):
            assert status == 200, said
            assert said["choices"][0]["text"] == alone(text, 24, **how)
            assert said["usage"]["prompt_tokens"] == len(text)
    again = fleet.ask(COMPLETIONS, body(asked[1][0], 24))[1]
    assert again["choices"][0]["text"] == alone(asked[1][0], 24)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    fleet.await_idle()
    assert fleet.store.stat().counters["tickets_claimed_ahead"] >= len(asked) // 2


def test_a_request_is_followed_through_all_processes(
    fleet: Fleet, collector: SpanCollector
) -> None:
    trace, parent = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
    given = {"X-Request-Id": "followed", "traceparent": f"00-{trace}-{parent}-01"}
    assert fleet.ask(COMPLETIONS, body(prompt(1), 5), **given)[0] == 200

    def told() -> list[tuple[str, Span]]:
        """All but those of pulling ahead, which a short prompt may be too soon for."""
        return [each for each in collector.spans[trace] if each[1].name != "prepare"]

    until("its spans have come", lambda: len(told()) == 11, WAIT_S)
    spans = told()
    ids = {span.span_id.hex(): span.name for _, span in spans} | {parent: "client"}
    decode = next(service for service, span in spans if span.name == "transfer")
    assert {(service, span.name, ids[span.parent_span_id.hex()]) for service, span in spans} == {
        ("gateway", COMPLETIONS, "client"),
        *(("gateway", stage, COMPLETIONS) for stage in ("admission", "prefill", "route")),
        *(("gateway", stage, COMPLETIONS) for stage in ("install", "decode")),
        ("prefill-0", "prefill", COMPLETIONS),
        ("prefill-0", "compute", "prefill"),
        ("prefill-0", "hand_over", "prefill"),
        (decode, "decode", COMPLETIONS),
        (decode, "transfer", "decode"),
    }
    for name in ("gateway", "prefill-0", decode):
        lines = fleet.log(name).splitlines()
        about = [line for line in lines if re.search(r"workers\.(gateway|serve)_\w+: ", line)]
        named = re.compile(r"workers\.\w+: \S+/[0-9a-f]{12} [0-9a-f]{32}: ")
        assert all(named.search(line) for line in about), about
        assert any(re.search(f": followed/[0-9a-f]{{12}} {trace}: ", line) for line in about)


def test_a_stop_text_ends_the_answer_and_its_ticket(fleet: Fleet) -> None:
    whole = alone(prompt(1), 60)
    stop = whole[20:23]
    _, said = fleet.ask(COMPLETIONS, body(prompt(1), 60, stop=stop))
    assert said["choices"][0]["text"] == whole[: whole.find(stop)]
    assert said["choices"][0]["finish_reason"] == "stop"
    fleet.await_idle()


def test_who_hangs_up_leaves_nothing_behind(fleet: Fleet) -> None:
    with fleet.stream(COMPLETIONS, body(prompt(0), 2000)) as asked:
        pieces = asked.pieces()
        for _ in range(5):
            next(pieces)
        assert fleet.tickets().tickets == 1
    with Asked(fleet.gateway, COMPLETIONS, body(prompt(2, 9000), 10), {}):
        until("the second has begun", lambda: fleet.tickets().tickets == 1, WAIT_S)
    fleet.await_idle()
    assert fleet.ask(COMPLETIONS, body(prompt(1), 5))[0] == 200


def test_what_is_wrong_is_named(fleet: Fleet) -> None:
    status, said = fleet.ask(COMPLETIONS, {"prompt": "a", "top_p": 7})
    assert (status, said["error"]["param"]) == (400, "top_p")
    assert "got 7, want" in said["error"]["message"]
    with Asked(fleet.gateway, COMPLETIONS, {}, {"X-Request-Id": "no spaces"}) as asked:
        assert asked.response.status == 400


def test_a_gateway_that_is_taken_away_ends_what_runs_and_takes_nothing_new(fleet: Fleet) -> None:
    text, where = prompt(2), fleet.start_gateway("leaving", f"--drain-s={WAIT_S}")
    kept = http.client.HTTPConnection(where, timeout=WAIT_S)
    with closing(kept), Asked(where, COMPLETIONS, body(text, 800, stream=True), {}) as asked:
        kept.request("GET", "/healthz")
        assert kept.getresponse().read() == b'{"serving":true}'
        pieces = asked.pieces()
        said = [next(pieces) for _ in range(5)]
        fleet.processes["leaving"].send_signal(signal.SIGTERM)
        until("it takes nothing new", lambda: not listens(where), WAIT_S)
        kept.request("POST", COMPLETIONS, json.dumps(body(text, 5)))
        refused = kept.getresponse()
        assert (refused.status, json.load(refused)["error"]["code"]) == (503, "unavailable")
        kept.request("GET", "/healthz")
        assert kept.getresponse().status == 503
        said += pieces
    assert "".join(said) == alone(text, 800)
    assert fleet.processes["leaving"].wait(WAIT_S) == ExitCode.OK
    fleet.await_idle()


def test_workers_hear_only_who_proves_the_secret(fleet: Fleet) -> None:
    for path in ("/about", "/decode"):
        with Asked(fleet.where("decode-1"), path, {}, {}) as asked:
            assert asked.response.status == 401


def test_a_decode_worker_computes_prompts_when_many_wait(fleet: Fleet) -> None:
    def roles() -> list[str]:
        return sorted(row.role for row in fleet.tickets().workers)

    at_once = "queue_s=0.01", "load_max=1", "lasting_s=0", "dwell_s=0"
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(fleet.ask, COMPLETIONS, body(prompt(i), 150)) for i in range(2)]
        set_roles(fleet, "enforce", *at_once)
        with Asked(fleet.gateway, COMPLETIONS, body(prompt(2, 9000), 1), {}):
            changed = ["decode", "prefill", "prefill"]
            until("one has changed", lambda: roles() == changed, WAIT_S)
        set_roles(fleet, "off")
        for number, each in enumerate(running):
            status, said = each.result()
            assert status == 200, said
            assert said["choices"][0]["text"] == alone(prompt(number), 150)
    fleet.await_idle()
    asked = [prompt(number) for number in range(4)]
    with ThreadPoolExecutor(4) as threads:  # both compute, one generates
        answers = threads.map(lambda text: fleet.ask(COMPLETIONS, body(text, 20)), asked)
        for text, (status, said) in zip(asked, answers, strict=True):
            assert (status, said["choices"][0]["text"]) == (200, alone(text, 20))
    fleet.await_idle()


@pytest.mark.parametrize(("number", "how"), [(signal.SIGKILL, {}), (signal.SIGTERM, SAMPLED)])
def test_a_decode_worker_that_goes_is_followed_by_another(
    folder: Path, number: signal.Signals, how: dict[str, Any]
) -> None:
    text, tokens = prompt(1, 116), 300
    answer = [*text.encode(), *alone_tokens(text, tokens, **how)]
    with Fleet(folder, "prefill", "decode", "decode") as fleet:
        with fleet.stream(COMPLETIONS, body(text, tokens, **how)) as asked:
            pieces = asked.pieces()
            said = [next(pieces) for _ in range(20)]
            (row,) = fleet.tickets().rows
            until("a page of its answer is kept", lambda: in_pool(fleet.store, answer) >= 128)
            fleet.kill(row.decode, number)
            said += pieces
        assert "".join(said) == alone(text, tokens, **how)
        assert "2 routes" in fleet.log("gateway")
        (other,) = {"decode-1", "decode-2"} - {row.decode}
        (took,) = re.findall(r"KV of (\d+) of \d+ tokens from the pool", fleet.log(other))
        assert int(took) >= 128
        fleet.await_idle()


@pytest.mark.parametrize(("state", "how"), [("prefilling", {}), ("claimed ahead", AHEAD)])
def test_a_prefill_worker_that_dies_is_followed_by_another(
    folder: Path, state: str, how: dict[str, Any]
) -> None:
    text = prompt(0, 6_000)
    fleet_of = Fleet(folder, "prefill", "prefill", "decode", **how)
    with fleet_of as fleet, ThreadPoolExecutor(1) as thread:
        asking = thread.submit(fleet.ask, COMPLETIONS, body(text, 8))

        def is_computed() -> bool:
            return any(row.state == state for row in fleet.tickets().rows)

        until(f"the prompt is {state}", is_computed, WAIT_S)
        fleet.kill(fleet.tickets().rows[0].prefill)
        status, said = asking.result()
        assert (status, said["choices"][0]["text"]) == (200, alone(text, 8))
        assert "2 prefills" in fleet.log("gateway")
        fleet.await_idle()


def test_a_worker_that_does_both_keeps_what_is_not_worth_a_hand_over(folder: Path) -> None:
    with Fleet(folder, "both", "decode") as fleet:
        for text, routes in ((prompt(1), 0), (prompt(2, 600), 1)):
            status, said = fleet.ask(COMPLETIONS, body(text, 24, **SAMPLED, kvharbor_timings=True))
            assert (status, said["choices"][0]["text"]) == (200, alone(text, 24, **SAMPLED))
            assert said["usage"]["kvharbor_timings"]["routes"] == routes

        def is_kept() -> bool:
            _, again = fleet.ask(COMPLETIONS, body(prompt(1), 5))
            return bool(again["usage"]["prompt_tokens_details"]["cached_tokens"])

        until("the pages of what it did are in the pool", is_kept, WAIT_S)
        with fleet.stream(COMPLETIONS, body(prompt(0), 2000)) as asked:
            next(asked.pieces())
            assert fleet.tickets().rows[0].state == "prefilling"
        fleet.await_idle()


@pytest.mark.parametrize(
    ("number", "how", "passed"),
    [
        (signal.SIGKILL, SAMPLED, "2 prefills, 0 routes"),
        (signal.SIGTERM, {}, "1 prefills, 1 routes"),
    ],
)
def test_a_worker_that_did_both_and_goes_is_followed_by_another(
    folder: Path, number: signal.Signals, how: dict[str, Any], passed: str
) -> None:
    text, tokens = prompt(1), 200
    with Fleet(folder, "both", "both") as fleet:
        with fleet.stream(COMPLETIONS, body(text, tokens, **how)) as asked:
            pieces = asked.pieces()
            said = [next(pieces) for _ in range(20)]
            (row,) = fleet.tickets().rows
            fleet.kill(row.prefill, number)
            said += pieces
        assert "".join(said) == alone(text, tokens, **how)
        assert passed in fleet.log("gateway")
        fleet.await_idle()


def test_a_full_fleet_asks_for_patience(folder: Path) -> None:
    small = ("--capacity-tokens=400", "--rows=2")
    with Fleet(folder, "prefill", "decode", options=small) as fleet:
        with fleet.stream(COMPLETIONS, body(prompt(0), 220)) as asked:
            pieces = asked.pieces()
            said = next(pieces)
            with Asked(fleet.gateway, COMPLETIONS, body(prompt(1), 220), {}) as refused:
                assert refused.response.status == 429, refused.response.read()
                assert int(refused.response.headers["Retry-After"]) >= 1
                error = json.loads(refused.response.read())["error"]
            assert error["type"] == "rate_limit_error"
            assert error["code"] == "decode_occupancy"
            assert said + "".join(pieces) == alone(prompt(0), 220)
        fleet.await_idle()
        # Answers have been short: more is admitted than there is room for, and the younger waits.
        for _ in range(LEAST):
            assert fleet.ask(COMPLETIONS, body(prompt(1), 1))[0] == 200
        texts = [prompt(1, 102), prompt(1, 116)]
        with ThreadPoolExecutor(2) as threads:
            answers = threads.map(lambda text: fleet.ask(COMPLETIONS, body(text, 220)), texts)
            for text, (status, said) in zip(texts, answers, strict=True):
                assert (status, said["choices"][0]["text"]) == (200, alone(text, 220))
        assert "has handed it on" in fleet.log("gateway")
        fleet.await_idle()
