"""The demo: a pool, a prefill worker and a decode worker, each in a process of its own.

    kvharbor demo    (or python -m workers.demo)

Owns the processes and their order. Exits with 0 only if every token that was generated from pages
of the pool is the one that a single process without a pool generates.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

from rich.console import Console

from kvstore.child import tied
from kvstore.errors import ConfigError
from kvstore.exit_codes import ExitCode, ProgramDied
from workers.demo_reports import DecodeReport, PrefillReport, read_report
from workers.demo_verdict import failures, table
from workers.own_programs import QUIET, conclude

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

GUIDE: Final = Path(__file__).parent / "texts" / "guide.txt"
QUESTIONS: Final = (
    "What is the license of kvharbor?",
    "What is a lease?",
    "Where does the master keep its notes?",
)
FOLLOW_UPS: Final = ("What is a tenant?", "What is a checksum?")
FREE_QUESTIONS: Final = ("What is this text about?", "Who wrote this text?")
DRAM: Final = "512MiB"
STOP_TIMEOUT_S: Final = 30.0
PIPE_WIDTH: Final = 132
"""Columns of output that is not for a terminal."""


class Script:
    """What is said and asked, in a folder that is gone afterwards."""

    def __init__(self, options: argparse.Namespace, folder: Path, console: Console) -> None:
        """Fill in what the options leave open. ConfigError when a document is not there."""
        self.console = console
        self.folder = folder
        self.model: str = options.model
        self.answer_tokens: int = options.answer_tokens
        self.documents: list[Path] = options.document or _documents(self.model)
        own = () if options.document else QUESTIONS
        self.questions: Sequence[str] = options.question or own or FREE_QUESTIONS
        asked = options.document or options.question
        self.follow_ups: Sequence[str] = options.follow_up or (() if asked else FOLLOW_UPS)

    def say(self, text: str) -> None:
        """A line, at once: programs write to the same terminal."""
        self.console.print(text, highlight=False, markup=False)
        sys.stdout.flush()

    def report(self, name: str) -> Path:
        """Where a program writes what it did."""
        return self.folder / f"{name}.json"

    def common(self, report: str) -> list[str]:
        """Options of all programs that run the model."""
        documents = [f"--document={document}" for document in self.documents]
        return [f"--model={self.model}", f"--report={self.report(report)}", *documents]

    def prefill(self, master: str) -> None:
        """Run a prefill worker to its end."""
        _run("workers.prefill", f"--master={master}", *self.common("prefill"))

    def decode(self, report: str, *more: str) -> None:
        """Run a decode worker to its end."""
        questions = [f"--question={question}" for question in self.questions]
        follow_ups = [f"--follow-up={question}" for question in self.follow_ups]
        length = f"--answer-tokens={self.answer_tokens}"
        _run("workers.decode", *self.common(report), *questions, *follow_ups, length, *more)


def play(script: Script, dram: str) -> ExitCode:
    """Run the whole demo; OK if the pool changed no token."""
    started = time.perf_counter()
    if script.model == "smollm":
        script.say("1/5 the model: SmolLM2-135M-Instruct (converted on first use, half a minute)")
        _run("workers.smollm")
    else:
        script.say("1/5 the model: a random one; its answers are noise")
    with _pool(script, dram) as master:
        script.say("3/5 a prefill worker reads the document and hands its KV to the pool")
        script.prefill(master)
        script.say("4/5 a decode worker answers questions; the pool knows how each prompt begins")
        script.decode("pooled", f"--master={master}")
    script.say("5/5 the same questions in one process without a pool, split at the same token")
    script.decode("alone", f"--alone={script.report('pooled')}")
    verdict = _conclude(script)
    script.say(f"The demo took {time.perf_counter() - started:.0f} s.")
    return verdict


def _conclude(script: Script) -> ExitCode:
    prefill = read_report(script.report("prefill"), PrefillReport)
    pooled = read_report(script.report("pooled"), DecodeReport)
    alone = read_report(script.report("alone"), DecodeReport)
    script.console.print(table(pooled, alone))
    rate = prefill.bytes_moved / prefill.store_s / 1e9 if prefill.store_s else 0.0
    script.say(
        f"Prefill (process {prefill.pid}) handed over {prefill.pages_stored} pages, "
        f"{prefill.bytes_moved / 1e6:.0f} MB, in {prefill.store_s * 1e3:.0f} ms ({rate:.2f} GB/s). "
        f"Decode was process {pooled.pid}, the run without a pool process {alone.pid}."
    )
    wrong = failures(prefill, pooled, alone)
    if wrong:
        for line in wrong:
            script.say(f"FAILED {line}")
        return ExitCode.FAILED
    tokens = sum(len(turn.generated) for turn in pooled.turns)
    script.say(
        f"All {tokens} generated tokens are identical to those of one process without a pool."
    )
    return ExitCode.OK


@contextmanager
def _pool(script: Script, dram: str) -> Iterator[str]:
    """A standalone pool in the script's folder; yields where its master listens."""
    data_dir = f"--data-dir={script.folder / 'pool'}"
    local = ("--listen=127.0.0.1:0", "--worker-listen=127.0.0.1:0")
    quiet = ("--admin=off", "--worker-admin=off")
    process = subprocess.Popen(
        tied("kvstore.cli.main", "up", "--json", data_dir, f"--dram={dram}", *local, *quiet),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        process_group=0,  # Ctrl-C ends the programs that use it before it ends the pool.
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise _died("kvharbor up", process.wait())
        ready = json.loads(line)
        master: str = ready["master"]["listen"]
        script.say(
            f"2/5 the pool: master at {master} (process {ready['master']['pid']}), "
            f"worker at {ready['worker']['listen']} (process {ready['worker']['pid']}), {dram}"
        )
        yield master
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.communicate()
        subprocess.run(
            tied("kvstore.cli.main", "wipe", data_dir), stdout=subprocess.DEVNULL, check=False
        )


def _run(module: str, *arguments: str) -> None:
    """Run one of our modules to its end on this terminal. ProgramDied unless it ends with 0."""
    environment = {**QUIET, **os.environ}
    command = tied(module, *arguments)
    returncode = subprocess.run(
        command, stdin=subprocess.DEVNULL, env=environment, check=False
    ).returncode
    if returncode:
        raise _died(module, returncode)


def _died(program: str, returncode: int) -> ProgramDied:
    """It said why on standard error."""
    return ProgramDied(f"{program} ended with {returncode}", returncode)


def _documents(model: str) -> list[Path]:
    """The licence, then a guide to kvharbor; without the licence where a token is but a byte."""
    return [GUIDE] if model == "tiny" else [_licence(), GUIDE]


def _licence() -> Path:
    """LICENSE of this checkout, or of the installed distribution."""
    checkout = Path(__file__).parent.parent / "LICENSE"
    installed = [
        Path(str(file.locate()))
        for file in metadata.files("kvharbor") or ()
        if file.name == "LICENSE"
    ]
    for path in (checkout, *installed):
        if path.is_file():
            return path
    raise ConfigError("LICENSE: not found beside the packages; name a text with --document")


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        "kvharbor demo",
        description="A pool, a prefill and a decode process on a real model; checks every token.",
    )
    parser.add_argument(
        "--model", choices=("smollm", "tiny"), default="smollm", help="tiny: random, but quick"
    )
    parser.add_argument(
        "--document", type=Path, action="append", metavar="FILE", help="another text to ask about"
    )
    parser.add_argument("--question", action="append", metavar="TEXT", help="instead of our own")
    parser.add_argument(
        "--follow-up", action="append", metavar="TEXT", help="goes on with the last question's chat"
    )
    parser.add_argument("--answer-tokens", type=int, default=64, metavar="N", help="at most")
    parser.add_argument("--dram", default=DRAM, metavar="SIZE", help="memory of the pool")
    return parser.parse_args(arguments)


def main() -> None:
    """Run the demo; ends the process."""
    options = _options(sys.argv[1:])
    conclude("kvharbor demo", lambda: _run_all(options))


def _run_all(options: argparse.Namespace) -> ExitCode:
    width = None if sys.stdout.isatty() else PIPE_WIDTH
    # A short path: the pool's Unix socket lies in it.
    with tempfile.TemporaryDirectory(prefix="kvharbor-demo-") as folder:
        return play(Script(options, Path(folder), Console(width=width)), options.dram)


if __name__ == "__main__":
    main()
