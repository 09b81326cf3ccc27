"""Which processes `kvharbor up --pd` starts, with what options."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.cli.places import Places
from kvstore.cli.serving import MODELS, parse_serving
from kvstore.errors import BadValue
from workers import engine_options

PLACES = Places(Path("/data"), Path("/segments"))


def test_a_shape_names_each_worker_and_its_role() -> None:
    found = parse_serving("1p2d", "tiny", "host:1", Path("/secret"))
    assert found is not None
    names = [("prefill-1", "prefill"), ("decode-1", "decode"), ("decode-2", "decode")]
    assert found.workers() == names
    shared = {"--master=m:1", "--data-dir=/data", "--secret-file=/secret"}
    worker = set(found.worker_options("decode-1", "decode", PLACES, "m:1"))
    own = {"--role=decode", "--name=decode-1", "--model=tiny", "--threads=1"}
    assert worker == own | shared
    gateway = set(found.gateway_options(["w:1", "w:2"], PLACES, "m:1"))
    assert gateway == {"--listen=host:1", "--worker=w:1", "--worker=w:2"} | shared


def test_workers_change_roles_where_that_is_asked_for() -> None:
    found = parse_serving("1p2d", "tiny", "host:1", None, switch_roles=True)
    assert found is not None
    assert "--switch-roles" in found.worker_options("decode-1", "decode", PLACES, "m:1")


def test_without_a_shape_nothing_is_served() -> None:
    assert parse_serving(None, "tiny", "host:1", None) is None
    with pytest.raises(BadValue, match="--switch-roles"):
        parse_serving(None, "tiny", "host:1", None, switch_roles=True)


@pytest.mark.parametrize("shape", ["", "p2d", "0p1d", "1p0d", "1d2p", "1p2d3", "100p1d", "1p"])
def test_another_shape_is_refused(shape: str) -> None:
    with pytest.raises(BadValue, match="as in 1p2d"):
        parse_serving(shape, "tiny", "host:1", None)


def test_the_models_are_those_that_workers_load() -> None:
    assert MODELS == engine_options.MODELS


def test_another_model_is_refused() -> None:
    with pytest.raises(BadValue, match="--model: got 'big', want one of smollm, tiny"):
        parse_serving("1p1d", "big", "host:1", None)
