"""vLLM servers with their agents, a gateway and a pool: a fleet of `tests.cluster.serving`."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from typing import TYPE_CHECKING, Any, Final

from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from kvstore.announcement import read_announcement
from tests.cluster.servers import die_with_parent, until
from tests.cluster.serving import Fleet
from tests.cluster.up import clean_environment
from tests.engines.models import COMMON
from tests.engines.program import ROOT
from tests.engines.vllm_engine import BLOCK, CONNECTOR
from workers.drills.ports import free_port

if TYPE_CHECKING:
    from pathlib import Path

START_S: Final = 400.0
ASK_S: Final = 120.0
SETTINGS: Final = ("--dtype=float32", "--enforce-eager", "--seed=0", "--max-model-len=1024",
    "--max-num-seqs=8", "--max-num-batched-tokens=1024", f"--block-size={BLOCK}",
    "--prefix-caching-hash-algo=sha256_cbor", "--enable-prompt-tokens-details",
)  # fmt: skip
END: Final = 2
"""The token that ends an answer."""


def give_words(model: Path) -> None:
    """Write a tokenizer into the model's folder: token 7 is the word w7."""
    words = {f"w{number}": number for number in range(int(COMMON["vocab_size"]))}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([AddedToken(f"w{END}", single_word=True, special=True)])
    tokenizer.save(str(model / "tokenizer.json"))
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": f"w{END}"}
    (model / "tokenizer_config.json").write_text(json.dumps(said))
    (model / "chat_template.jinja").write_text("{{ messages[-1]['content'] }}")


class VllmFleet(Fleet):
    """A pool, vLLM servers of a tiny model, an agent beside each, and a gateway."""

    def __init__(self, folder: Path, model: Path, *roles: str) -> None:
        """Remember what to start."""
        super().__init__(folder, *roles)
        self._model = model
        self.servers: dict[str, subprocess.Popen[bytes]] = {}
        self.urls: dict[str, str] = {}

    def start(self, name: str, role: str) -> None:
        """Start a server and its agent."""
        port = free_port()
        self.urls[name] = f"http://127.0.0.1:{port}"
        description = self.folder / f"{name}.description"
        transfer = {
            "kv_connector": "KvharborConnector",
            "kv_connector_module_path": CONNECTOR,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "masters": self.up.master,
                "timeout_s": 5.0,
                # On a machine that others keep busy a page may be late, and the test waits for it.
                "lookup_deadline_s": 5.0,
                "handover_deadline_s": 20.0,
                "description_file": str(description),
            },
        }
        command = [
            *(sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", *SETTINGS),
            *(f"--model={self._model}", "--host=127.0.0.1", f"--port={port}"),
            *("--kv-transfer-config", json.dumps(transfer)),
        ]
        environment = clean_environment() | {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
        }
        with (self.folder / f"vllm-{name}.log").open("wb") as log:
            self.servers[name] = subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                preexec_fn=die_with_parent, start_new_session=True,
            )  # fmt: skip
        self._run(
            name, "workers.vllm_agent", f"--role={role}", f"--name={name}",
            f"--vllm={self.urls[name]}", f"--description={description}",
            f"--tokenizer={self._model}", "--capacity-tokens=8192", "--rows=8",
        )  # fmt: skip

    def start_gateway(self, name: str, *options: str) -> str:
        """As soon as the servers are there."""
        for each in self.servers:
            self.await_agent(each)
        return super().start_gateway(name, *options)

    def await_agent(self, name: str) -> None:
        """Until an agent, and so its server, is there."""

        def is_there() -> bool:
            assert self.servers[name].poll() is None, self.log(f"vllm-{name}")[-6000:]
            assert self.processes[name].poll() is None, self.log(name)
            found = read_announcement(self.folder, name)
            return found is not None and found.pid == self.processes[name].pid

        until(f"{name} is there", is_there, START_S)

    def kill_server(self, name: str) -> None:
        """Kill a vLLM server, not its agent: that ends by itself."""
        server = self.servers.pop(name)
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()

    def ask_server(self, name: str, **body: object) -> dict[str, Any]:
        """Ask a server itself for a completion."""
        request = urllib.request.Request(
            f"{self.urls[name]}/v1/completions", json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )  # fmt: skip
        with urllib.request.urlopen(request, timeout=ASK_S) as response:
            said: dict[str, Any] = json.load(response)
            return said

    def metric(self, name: str, metric: str) -> float:
        """A counter or gauge of a server's, all labels together."""
        with urllib.request.urlopen(f"{self.urls[name]}/metrics", timeout=ASK_S) as response:
            page = response.read().decode()
        found = re.findall(rf"^{re.escape(metric)}(?:{{.*}})? (\S+)$", page, re.MULTILINE)
        return sum(map(float, found))

    def _stop_all(self) -> None:
        super()._stop_all()
        for name in list(self.servers):
            self.kill_server(name)
