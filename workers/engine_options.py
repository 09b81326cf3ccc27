"""What the programs that run a model have in common: options, the model's choice, their lines.

Knows no pool: each program connects by itself.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvstore import limits
from kvstore.config import read_secret
from kvstore.errors import KVStoreError
from kvstore.exit_codes import ExitCode, exit_code_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from workers.generation import LanguageModel

MODELS: Final = ("smollm", "tiny", "tiny-2")


def pool_parser(program: str, description: str) -> argparse.ArgumentParser:
    """A parser of what every program of the engine's side has to know of the pool."""
    parser = argparse.ArgumentParser(program, description=description)
    parser.add_argument(
        "--master",
        default=f"127.0.0.1:{limits.MASTER_PORT}",
        metavar="HOST:PORT[,...]",
        help="where the pool's masters listen",
    )
    parser.add_argument(
        "--secret-file", type=Path, metavar="FILE", help="file with the cluster secret"
    )
    return parser


def model_parser(program: str, description: str) -> argparse.ArgumentParser:
    """A parser of the options that programs with a model take."""
    parser = pool_parser(program, description)
    parser.add_argument(
        "--model",
        choices=MODELS,
        default=MODELS[0],
        help="smollm: SmolLM2-135M-Instruct; tiny: a random model of no size; tiny-2: that "
        "with other weights, as its next revision would have",
    )
    return parser


def engine_parser(program: str, description: str) -> argparse.ArgumentParser:
    """A parser of the options that programs about a document take."""
    parser = model_parser(program, description)
    parser.add_argument(
        "--document",
        type=Path,
        action="append",
        required=True,
        metavar="FILE",
        help="a text to ask about; several are read one after another",
    )
    parser.add_argument("--report", type=Path, metavar="FILE", help="write what was done, as JSON")
    return parser


def secret_of(options: argparse.Namespace) -> bytes | None:
    """The cluster secret, if one was named. ConfigError when it cannot be read."""
    return None if options.secret_file is None else read_secret(options.secret_file)


def load_model(name: str) -> LanguageModel:
    """Load one of MODELS. ConfigError when it is not installed."""
    # Only now: either costs seconds, and the options may have been wrong.
    if name != MODELS[0]:
        from workers import tiny_llama

        return tiny_llama.load(tiny_llama.SEED if name == "tiny" else tiny_llama.NEXT_SEED)
    from workers import smollm

    return smollm.load()


def tokenizer_folder(name: str) -> str:
    """Where the tokenizer of one of MODELS lies; empty where a token is a byte."""
    if name != MODELS[0]:
        return ""
    from workers import smollm

    return str(smollm.converted())


def say(program: str, text: str) -> None:
    """One line of progress on standard output, at once."""
    sys.stdout.write(f"  {program} {os.getpid()}: {text}\n")
    sys.stdout.flush()


def run_program(program: str, run: Callable[[], None]) -> None:
    """Run a program's body; a KVStoreError ends the process with one line and its exit code."""
    try:
        run()
    except KVStoreError as error:
        sys.stderr.write(f"{program}: {error}\n")
        sys.exit(exit_code_of(error))
    except KeyboardInterrupt:
        sys.exit(ExitCode.FAILED)
