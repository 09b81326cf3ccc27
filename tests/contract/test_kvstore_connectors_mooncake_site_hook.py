"""What the shim has Python do before a program: `mooncake.store` is ours, all else as it was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from kvstore.cli.mooncake import SITE, mooncake_shim, shimmed
from kvstore.errors import BadValue

if TYPE_CHECKING:
    from pathlib import Path

PROGRAM = """
import importlib.util, sys
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
print(MooncakeDistributedStore.__module__, ReplicateConfig().replica_num)
engine = importlib.util.find_spec("mooncake.engine")
print("engine" if engine and engine.origin.endswith(".so") else "no engine")
try:
    from mooncake.store import EngramStore
except ImportError as error:
    print("absent", "EngramStore" in str(error))
"""


def run(program: str, environment: dict[str, str], *options: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, *options, "-c", program],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.splitlines()


def test_an_unchanged_import_brings_our_store_and_the_wheels_engine() -> None:
    environment = shimmed(dict(os.environ), "m:1", None, "")
    said = run(PROGRAM, environment)
    assert said == ["kvstore.connectors.mooncake 1", "engine", "absent True"]
    child = (
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {PROGRAM!r}], check=True)"
    )
    assert run(child, environment) == said, "what it starts is shimmed, too"


def test_without_the_wheel_there_is_our_store_alone(tmp_path: Path) -> None:
    hidden = "import sys\nsys.path = [p for p in sys.path if 'site-packages' not in p]\n"
    found = "from importlib.util import find_spec\nprint(find_spec('mooncake').loader)\n"
    (said,) = run(hidden + found, shimmed({"PATH": str(tmp_path)}, "m:1", None, ""))
    assert "EmptyPackage" in said


def test_another_sitecustomize_is_run_as_before(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('shadowed', __name__)\n")
    environment = shimmed({**os.environ, "PYTHONPATH": str(tmp_path)}, "m:1", None, "")
    assert run(f"import sys; print(sys.path[1] == {str(SITE)!r})", environment) == [
        "shadowed sitecustomize", "True",
    ]  # fmt: skip


def test_the_environment_names_the_pool(tmp_path: Path) -> None:
    given = {"PYTHONPATH": "/mine", "KVHARBOR_MASTER": "old:1"}
    found = shimmed(given, "m:1", tmp_path / "secret", "models")
    assert found == {
        "PYTHONPATH": f"{SITE}{os.pathsep}/mine",
        "KVHARBOR_MASTER": "m:1",
        "KVHARBOR_CLUSTER_SECRET_FILE": str(tmp_path / "secret"),
        "KVHARBOR_MOONCAKE_NAMESPACE": "models",
    }
    assert "KVHARBOR_MOONCAKE_NAMESPACE" not in shimmed({}, "m:1", None, "")
    assert given == {"PYTHONPATH": "/mine", "KVHARBOR_MASTER": "old:1"}


def shim(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "kvstore.cli.main", "mooncake-shim", "--", *command],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_the_shim_becomes_the_program() -> None:
    program = "import os, sys; print(os.getppid()); sys.exit(int(sys.argv[1]))"
    done = shim(sys.executable, "-c", program, "23")
    assert (done.returncode, done.stdout) == (23, f"{os.getpid()}\n")


def test_a_program_that_is_not_python_is_ended_by_a_broken_pipe() -> None:
    done = shim("sh", "-c", "yes | head -n 1")
    assert (done.stdout, done.stderr) == ("y\n", "")


@pytest.mark.parametrize(
    "options",
    [["-I"], ["-E"], ["-uS"], ["-W", "ignore", "-I"], ["-X", "dev", "-sE"], ["-Wi", "-I"]],
    ids=" ".join,
)
def test_a_python_that_would_pass_the_shim_by_is_refused(options: list[str]) -> None:
    with pytest.raises(BadValue, match=f"command: got '{options[-1]}', want Python without -I"):
        mooncake_shim([sys.executable, *options, "-c", "pass"])


@pytest.mark.parametrize(
    "words",
    [
        ["python3", "-Wdefault::EncodingWarning", "-Xno_debug_rangES", "program.py", "-I"],
        ["python", "-uc", "pass", "-I"],
        ["python", "-mIES", "-E"],
        ["python", "-", "-S"],
        ["python", "--check-hash-based-pycs", "never", "program.py", "-I"],
        ["env", "-S", "python"],
    ],
    ids=" ".join,
)
def test_other_options_are_the_programs_own(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run: list[list[str]] = []
    monkeypatch.setattr(os, "execvpe", lambda _, command, __: run.append(command))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    mooncake_shim(words)
    assert run == [words]


def test_a_program_that_is_not_there_is_named() -> None:
    done = shim("/nowhere/program")
    assert done.returncode == 2
    assert "/nowhere/program" in done.stderr
