"""Section [master]: values that are refused, and what the core is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore import limits
from kvstore.config import Sources
from kvstore.errors import ConfigError
from master import (
    chunk_values,
    lenders,
    namespaces,
    pins,
    policy_requests,
    pool_time,
    tombstones,
    write_budget,
)
from master.config import MasterConfig
from master.metadata import FAMILIES
from master.tunables import Tunables


def read(**table: object) -> MasterConfig:
    return Sources(Path("f.toml"), {"master": table}).section(MasterConfig, "master")


def test_the_defaults_are_those_of_the_limits() -> None:
    assert read().tunables("c") == Tunables(cluster="c")
    assert str(read().listen) == f"127.0.0.1:{limits.MASTER_PORT}"
    assert str(read().admin) == f"127.0.0.1:{limits.MASTER_ADMIN_PORT}"


def test_what_is_set_reaches_the_core() -> None:
    told = read(
        lease_ttl_s=2, page_ttl_s=60, page_age_max_s=70, heartbeat_interval_s=0.1,
        worker_lost_after_s=1, segment_forget_s=80, watermark_high=0.8, watermark_low=0.5,
        hints="learned", pin_quota=0.5, eviction="ttl-lfu", eviction_parameters={"ttl_s": 60},
        replicas=3, replicas_apart="worker", repair_after_s=1.0, copy_bytes_per_s="1MiB",
        stale_read_max_s=90,
        watermark_demote=0.4, move_bytes_per_s="1GB", promote_hits=3,
        metadata_bytes_per_s="3MB",
        nvme_admission="second-touch", nvme_admission_parameters={"touches": 3},
        placement="two_choices", placement_parameters={"load_grain_bytes": 4096},
        replication="observe", replication_parameters={"extra_max": 3},
        erasure="reed-solomon", erasure_parameters={"k": 2},
        prefill_routing="least_queued", decode_routing="same_prefix",
        decode_routing_parameters={"fuller_max": 0.5}, colocation="never",
        roles="observe", roles_parameters={"dwell_s": 5.0}, first_token_over=2.0,
    ).tunables("c")  # fmt: skip
    assert told == Tunables(
        cluster="c", lease_ttl_s=2.0, page_ttl_s=60.0, page_age_max_s=70.0,
        heartbeat_interval_s=0.1, worker_lost_after_s=1.0, segment_forget_s=80.0,
        watermark_high=0.8, watermark_low=0.5, hints="learned",
        pin_quota=0.5, eviction="ttl-lfu", eviction_parameters={"ttl_s": 60.0},
        replicas=3, replicas_apart="worker", repair_after_s=1.0, copy_bytes_per_s=1048576,
        stale_read_max_s=90.0,
        watermark_demote=0.4, move_bytes_per_s=1_000_000_000, promote_hits=3,
        metadata_bytes_per_s=3_000_000,
        nvme_admission="second-touch", nvme_admission_parameters={"touches": 3},
        placement="two_choices", placement_parameters={"load_grain_bytes": 4096},
        replication="observe", replication_parameters={"extra_max": 3},
        erasure="reed-solomon", erasure_parameters={"k": 2},
        prefill_routing="least_queued", decode_routing="same_prefix",
        decode_routing_parameters={"fuller_max": 0.5}, colocation="never",
        roles="observe", roles_parameters={"dwell_s": 5.0}, first_token_over=2.0,
    )  # fmt: skip


def test_parameters_of_a_policy_may_come_as_text() -> None:
    told = read(eviction_parameters="half_life_s=60, ghost_factor=1.5").tunables("c")
    assert told.eviction_parameters == {"half_life_s": 60.0, "ghost_factor": 1.5}


def test_a_parameter_that_the_policy_does_not_have_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^\[master\]: parameter: got 'ttl_s', want one of gho"):
        read(eviction_parameters={"ttl_s": 60})
    with pytest.raises(ConfigError, match=r"^\[master\]: half_life_s: got 0.0, want a number >= 1"):
        read(eviction_parameters={"half_life_s": 0})
    with pytest.raises(ConfigError, match=r"drive_writes_per_day: got 0.0, want a number >= 0.001"):
        read(nvme_admission_parameters={"drive_writes_per_day": 0})
    with pytest.raises(ConfigError, match=r"extra_max: got 0\.0, want a whole number >= 1"):
        read(replication_parameters={"extra_max": 0})
    with pytest.raises(ConfigError, match=r"parameter: got 'n', want one of k, m, cold_after_s"):
        read(erasure="reed-solomon", erasure_parameters={"n": 6})
    with pytest.raises(ConfigError, match=r"^\[master\]: k: got 17\.0, want a whole number <= 16"):
        read(erasure="reed-solomon", erasure_parameters={"k": 17})
    with pytest.raises(ConfigError, match=r"parameter: got 'k', want none"):
        read(erasure="off", erasure_parameters={"k": 4})


def test_the_default_that_a_value_is_at_odds_with_is_named() -> None:
    with pytest.raises(ConfigError, match=r"watermark_low: got 0.93, want .*_high \(0.92\)$"):
        read(watermark_high=0.92)


@pytest.mark.parametrize("written", [float("inf"), "inf"])
def test_pages_may_live_for_ever(written: object) -> None:
    told = read(page_ttl_s=written, page_age_max_s=written).tunables("c")
    assert (told.page_ttl_s, told.page_age_max_s) == (float("inf"), float("inf"))


def test_the_socket_is_below_the_data_folder_unless_it_is_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert read(data_dir="/d").unix_path() == Path("/d/master.sock")
    assert read(data_dir="d", unix="m").unix_path() == tmp_path / "d" / "m"
    assert read(unix="/run/m.sock").unix_path() == Path("/run/m.sock")
    assert read(unix="off").unix_path() is None


@pytest.mark.parametrize("unix", ["x" * 107, "bad\udcff"])
def test_a_path_that_no_socket_can_have_is_named(unix: str) -> None:
    with pytest.raises(ConfigError, match=r"^f\.toml: master\.unix: got .*at most 107 bytes"):
        read(data_dir="/d", unix=unix)


def test_a_data_folder_too_far_down_for_a_socket_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^\[master\]: unix: got '/x"):
        read(data_dir="/" + "x" * 95)
    assert read(data_dir="/" + "x" * 94).unix_path()


@pytest.mark.parametrize(
    ("key", "value", "want"),
    [
        ("lease_ttl_s", 10.5, "at most 10.0"),
        ("lease_ttl_s", 0.5, "more than 0.5"),
        ("page_ttl_s", 0.5, "1.0 to 604800.0"),
        ("page_ttl_s", 1e6, "1.0 to 604800.0 seconds, or inf"),
        ("page_ttl_s", -1, "a positive number of seconds, or inf"),
        ("page_ttl_s", 0, "a positive number of seconds, or inf"),
        ("page_ttl_s", float("nan"), "a number of seconds, or inf"),
        ("page_age_max_s", 0, "a positive number of seconds, or inf"),
        ("page_age_max_s", float("nan"), "a number of seconds, or inf"),
        ("worker_lost_after_s", 1, r"more than twice heartbeat_interval_s \(0.5\)"),
        ("pin_quota", 1.5, "0 to 1"),
        ("replicas", 0, "1 to 16"),
        ("replicas", 17, "1 to 16"),
        ("replicas_apart", "shelf", "one of host, worker"),
        ("repair_after_s", -1.0, "0 or more"),
        ("eviction", "random", "one of lrfu, lru, rent, s3-fifo, ttl-lfu"),
        ("nvme_admission", "some", "one of all, budget, learned, none, second-touch"),
        ("nvme_admission_parameters", 5, "a table of numbers, or name=number,name=number"),
        ("eviction_parameters", 5, "a table of numbers, or name=number,name=number"),
        ("eviction_parameters", {"half_life_s": "x"}, "a table of numbers, or name=number"),
        ("eviction_parameters", "half_life_s", "a table of numbers, or name=number"),
        ("placement", "nearest", "one of local_first, most_free, two_choices"),
        ("placement_parameters", {"fuller_max": "x"}, "a table of numbers, or name=number"),
        ("replication", "on", "one of enforce, observe, off"),
        ("erasure", "raid", "one of off, reed-solomon"),
        ("erasure_parameters", {"k": "four"}, "a table of numbers, or name=number"),
        ("repair_after_s", float("nan"), "a number"),
        ("hints", "guessed", "one of given, learned"),
        ("metadata", "postgres", "one of sqlite, etcd"),
        ("advertise", "x", "host:port"),
        ("stale_read_max_s", -1, "0 or more"),
        ("watermark_high", 1.5, "more than 0, at most 1"),
        ("watermark_high", 0, "more than 0, at most 1"),
        ("watermark_high", float("nan"), "a number"),
        ("watermark_low", 0.95, r"less than watermark_high \(0.95\)"),
        ("watermark_low", 0, "more than 0"),
        ("watermark_demote", 0.93, r"less than watermark_low \(0.93\)"),
        ("watermark_demote", 0, "more than 0"),
        ("move_bytes_per_s", 0, "at least 1"),
        ("metadata_bytes_per_s", 0, "at least 1"),
        ("promote_hits", 0, "at least 1"),
    ],
)
def test_a_bad_value_is_named(key: str, value: object, want: str) -> None:
    with pytest.raises(ConfigError, match=rf"^f\.toml: master\.{key}: got .*{want}"):
        read(**{key: value})


def test_masters_that_share_their_metadata_say_where_they_are() -> None:
    anywhere = {"listen": "0.0.0.0:7700", "metadata": "etcd"}
    with pytest.raises(
        ConfigError, match=r"^\[master\]: advertise: .*0\.0\.0\.0:7700 is none that"
    ):
        read(**anywhere)
    told = read(**anywhere, advertise=["10.0.0.1:7700", "m1.example:7700"])
    assert list(map(str, told.advertise)) == ["10.0.0.1:7700", "m1.example:7700"]
    assert read(listen="0.0.0.0:7700").metadata == "sqlite"


def test_the_core_is_told_who_it_is() -> None:
    told = read().tunables("c", "m1", ("10.0.0.1:7700",))
    assert (told.master, told.where) == ("m1", ("10.0.0.1:7700",))


def test_every_key_of_ours_is_known_as_ours() -> None:
    prefixes = (
        chunk_values.PREFIX, lenders.PREFIX, namespaces.PREFIX, pins.PREFIX, pool_time.KEY,
        policy_requests.PREFIX, tombstones.PREFIX, write_budget.KEY,
    )  # fmt: skip
    assert all(each.startswith(FAMILIES) for each in prefixes)
