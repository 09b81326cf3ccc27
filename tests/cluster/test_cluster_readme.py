"""What the README shows is run: its program against a real pool, its commands as they stand."""

from __future__ import annotations

import itertools
import re
import runpy
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvstore import Hit, KVStore, Stored
from kvstore.connectors.transformers import PooledPrefix
from tests.cluster.up import kvharbor
from tests.tiny_model import text
from tests.tiny_models import model_of

if TYPE_CHECKING:
    from tests.cluster.up import Up

README = Path(__file__).parents[2] / "README.md"
ADDRESS = "127.0.0.1:7700"


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language."""
    text = README.read_text(encoding="utf-8")
    # All of them, else the end of one would be taken for the beginning of another.
    found = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return [block for name, block in found if name == language]


def block_with(words: str) -> str:
    """The Python program in which these words are."""
    (block,) = (block for block in blocks("python") if words in block)
    return block


class Tokens:
    """A tokenizer whose texts are tokens."""

    def __call__(self, prompt: list[int]) -> dict[str, list[int]]:
        """What models take."""
        return {"input_ids": prompt}

    def decode(self, tokens: torch.Tensor) -> list[int]:
        """What they gave."""
        return tokens.tolist()


def test_the_loop_in_the_readme_answers_as_without_a_pool(shared_pool: Up, tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    script.write_text(block_with("PooledPrefix("), encoding="utf-8")
    answers = runpy.run_path(str(script))["answers"]
    model = model_of("gemma3")
    prompts = [text(70), [*text(64), 5, 6]]
    got = list(answers(model, Tokens(), prompts, shared_pool.master))
    for prompt, answer in zip(prompts, got, strict=True):
        alone = model.generate(torch.tensor([prompt]), max_new_tokens=40, do_sample=False)
        assert answer == alone[0, len(prompt) :].tolist()
    with KVStore.connect(shared_pool.master) as store:
        assert PooledPrefix(store, model, "my-model").ends(prompts[1]) == [64]


def test_the_program_in_the_readme_stores_and_reads(shared_pool: Up, tmp_path: Path) -> None:
    program = block_with("store.buffer(")
    assert ADDRESS in program
    script = tmp_path / "readme.py"
    script.write_text(program.replace(ADDRESS, shared_pool.master), encoding="utf-8")
    page_bytes = 64 * 32 * 8 * (128 + 128) * 2  # tokens, layers, heads, keys and values, bfloat16
    kv = bytes(range(256)) * (3 * page_bytes // 256)
    names: dict[str, Any] = runpy.run_path(str(script), {"tokens": list(range(200)), "kv": kv})
    store, pages, chain = names["store"], names["pages"], names["chain"]
    assert names["match"].pages == len(chain) == 3
    again = store.put(pages, chain, names["source"], names["places"])
    assert not any(isinstance(outcome, Stored) for outcome in again)
    outcomes = store.read(names["match"], names["into"], names["places"])
    assert outcomes == [Hit()] * 3
    assert names["into"].view == kv
    store.close()


def test_the_commands_in_the_readme_exist(shared_pool: Up) -> None:
    lines = [line for block in blocks("") for line in block.splitlines()]
    commands = [
        line.split("#")[0].split() for line in lines if line.startswith(".venv/bin/kvharbor ")
    ]
    assert {words[1] for words in commands} == {
        "up",
        "status",
        "policy",
        "trace",
        "masters",
        "drill",
        "mooncake-shim",
    }
    for words in commands:
        own = list(itertools.takewhile("--".__ne__, words[1:]))  # behind it is another program
        asked = [word for word in own if word.startswith("--")]
        command = itertools.takewhile(re.compile(r"[a-z]+(-[a-z]+)*").fullmatch, own)
        shown = kvharbor(*command, "--help").stdout
        assert all(option in shown for option in asked)
    assert kvharbor("status", f"--master={shared_pool.master}").returncode == 0


def test_the_metrics_in_the_readme_exist(shared_pool: Up) -> None:
    served = ""
    for part in ("master", "worker"):
        with urllib.request.urlopen(f"http://{shared_pool.ready[part]['admin']}/metrics") as answer:
            served += answer.read().decode()
    named = re.findall(r"`(kvharbor_[a-z_]+)(\{[^}`]*\})?`", README.read_text(encoding="utf-8"))
    assert len(named) > 5
    for name, labels in named:
        assert f"# TYPE {name} " in served
        assert f"{name}{labels}" in served
