"""Banned calls, comments and file names, and proof that each ban catches an offender."""

from __future__ import annotations

import pytest

from tests.tidy import bans
from tests.tidy.sources import EVERYTHING, Source, sources

OFFENDERS = [
    ("kvstore/made_up.py", "import pickle"),
    ("kvstore/made_up.py", "from pickle import loads"),
    ("tests/unit/test_made_up.py", "import marshal as m"),
    ("benchmarks/made_up.py", "import dill"),
    ("kvstore/client/tensors.py", "import torch\nx = torch.load('f')"),
    ("kvstore/client/tensors.py", "from torch import load"),
    ("workers/made_up.py", "x = eval('1')"),
    ("workers/made_up.py", "exec('x = 1')"),
    ("kvstore/page.py", "def key(t: str) -> int:\n    return hash(t)"),
    ("master/made_up.py", "import time\nx = time.time()"),
    ("master/made_up.py", "import time as t\nclock = t.time_ns"),
    ("tests/cluster/test_made_up.py", "from time import time"),
    ("workers/made_up.py", "import time\nx = time.clock_gettime(time.CLOCK_REALTIME)"),
    ("kvstore/made_up.py", "from uuid import uuid1"),
    ("kvstore/made_up.py", "import os.path\nx = os.path.getmtime('f')"),
    ("master/made_up.py", "from datetime import datetime\nx = datetime.now()"),
    ("tests/unit/test_made_up.py", "from time import sleep\nsleep(1)"),
    ("tests/simulation/test_made_up.py", "import time\nx = time.monotonic()"),
    ("tests/unit/test_made_up.py", "import asyncio\nasync def f():\n    await asyncio.sleep(0.1)"),
    ("policies/made_up.py", "import random\nx = random.choice([1])"),
    ("tests/unit/test_made_up.py", "from random import shuffle"),
    ("kvstore/made_up.py", "try:\n    f()\nexcept Exception:\n    pass"),
    ("kvstore/made_up.py", "try:\n    f()\nexcept:\n    ..."),
    ("kvstore/made_up.py", "x = 1  # noqa"),
    ("kvstore/made_up.py", "x = 1  # noqa: E501"),
    ("kvstore/made_up.py", "x = 1  # type: ignore"),
    ("kvstore/made_up.py", "x = 1  # type: ignore[misc]"),
    ("kvstore/made_up.py", "x = 1  # TODO: later"),
    ("kvstore/utils.py", "x = 1"),
]

ALLOWED = [
    ("kvstore/cli/status.py", "import time\nx = time.time()"),
    ("benchmarks/made_up.py", "import time\nx = time.time()"),
    ("tests/cluster/test_made_up.py", "import time\ntime.sleep(1)"),
    ("kvstore/clock.py", "import time\nx = time.monotonic()"),
    ("kvstore/made_up.py", "import torch\nx = torch.loadable"),
    ("kvstore/made_up.py", "class A:\n    def __hash__(self) -> int:\n        return hash(self.x)"),
    ("kvstore/made_up.py", "x = store.hash('a')"),
    ("kvstore/made_up.py", "from kvstore.page import hash\nx = hash('a')"),
    ("tests/unit/test_made_up.py", "import asyncio\nasync def f():\n    await asyncio.sleep(0)"),
    ("policies/made_up.py", "import random\nx = random.Random(1).choice([1])"),
    ("kvstore/made_up.py", "try:\n    f()\nexcept OSError:\n    pass"),
    ("kvstore/made_up.py", "try:\n    f()\nexcept Exception:\n    log()\n    raise"),
    ("kvstore/made_up.py", "x = 1  # noqa: SLF001, E501  the harness looks inside"),
    ("kvstore/made_up.py", "x = 1  # type: ignore[misc]  # the stub lacks this overload"),
    ("kvstore/made_up.py", "x = 'TODO: not a comment'"),
]


def test_nothing_banned_is_used() -> None:
    found = [line for source in sources(EVERYTHING) for line in bans.violations(source)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(("path", "text"), OFFENDERS)
def test_an_offender_is_found(path: str, text: str) -> None:
    found = bans.violations(Source(path, text))
    assert found
    assert all(line.startswith(path) for line in found)


@pytest.mark.parametrize(("path", "text"), ALLOWED)
def test_what_looks_alike_is_allowed(path: str, text: str) -> None:
    assert not bans.violations(Source(path, text))


def test_a_finding_names_the_replacement() -> None:
    (found,) = bans.violations(Source("master/made_up.py", "import time\n\nx = time.time()"))
    assert found.startswith("master/made_up.py:3: time.time; use a Clock's monotonic time")
