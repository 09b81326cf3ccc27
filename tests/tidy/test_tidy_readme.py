"""The README's figures are those of the committed results, its configuration is one."""

from __future__ import annotations

import re
import tomllib

from benchmarks.results.readme_table import README, updated
from kvstore.config import ClusterConfig, Sources
from kvstore.coordination.etcd_config import EtcdConfig
from kvstore.startup import SECTIONS
from master.config import MasterConfig
from workers.config import WorkerConfig


def test_the_measured_table_is_made_from_the_results() -> None:
    text = README.read_text(encoding="utf-8")
    assert updated(text) == text, "run `python -m benchmarks.results.readme_table`"


def test_the_configuration_is_one() -> None:
    (text,) = re.findall(r"^```toml\n(.*?)^```", README.read_text(), re.MULTILINE | re.DOTALL)
    tables = tomllib.loads(text)
    assert set(tables) <= set(SECTIONS)
    sources = Sources(tables=tables)
    assert sources.section(ClusterConfig, "cluster").name == "pool-1"
    assert sources.section(MasterConfig, "master").metadata == "etcd"
    assert sources.section(EtcdConfig, "etcd").user == "kvharbor"
    assert len(sources.section(WorkerConfig, "worker").master) == 2
