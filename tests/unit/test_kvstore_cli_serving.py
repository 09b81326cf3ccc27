"""Which processes `kvharbor up --pd` starts, with what options."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.cli.places import Places
from kvstore.cli.serving import LAYERS, MODELS, parse_serving
from kvstore.errors import BadValue
from kvstore.planner import models
from workers import engine_options, tiny_llama

PLACES = Places(Path("/data"), Path("/segments"))


def test_a_shape_names_each_worker_and_its_role() -> None:
    found = parse_serving("1p2d", "tiny", "host:1", Path("/secret"))
    assert found is not None
    names = [("prefill-1", "prefill"), ("decode-1", "decode"), ("decode-2", "decode")]
    assert found.workers() == names
    shared = {"--master=m:1", "--data-dir=/data", "--secret-file=/secret"}
    worker = set(found.worker_options("decode-1", "decode", PLACES, "m:1"))
    own = {"--role=decode", "--name=decode-1", "--model=tiny", "--threads=1", "--layer-groups=1"}
    assert worker == own | shared
    gateway = set(found.gateway_options(["w:1", "w:2"], PLACES, "m:1"))
    assert gateway == {"--listen=host:1", "--worker=w:1", "--worker=w:2"} | shared


def test_workers_change_roles_where_that_is_asked_for() -> None:
    found = parse_serving("1p2d", "tiny", "host:1", None, switch_roles=True)
    assert found is not None
    assert "--switch-roles" in found.worker_options("decode-1", "decode", PLACES, "m:1")


def test_every_worker_hands_over_by_as_many_groups_of_layers() -> None:
    found = parse_serving("1p1d", "smollm", "host:1", None, layer_groups=30)
    assert found is not None
    for name, role in found.workers():
        assert "--layer-groups=30" in found.worker_options(name, role, PLACES, "m:1")


@pytest.mark.parametrize(("model", "groups"), [("tiny", 5), ("smollm", 31), ("tiny", 0)])
def test_more_groups_than_layers_are_refused(model: str, groups: int) -> None:
    want = f"--layer-groups: got {groups}, want 1 to {LAYERS[model]}, the layers of {model}"
    with pytest.raises(BadValue, match=want):
        parse_serving("1p1d", model, "host:1", None, layer_groups=groups)


def test_the_layers_are_those_of_the_models() -> None:
    tiny = tiny_llama.load().model.config.num_hidden_layers
    (group,) = models.model("smollm2-135m").groups
    assert {"smollm": group.layers, "tiny": tiny, "tiny-2": tiny} == LAYERS


def test_without_a_shape_nothing_is_served() -> None:
    assert parse_serving(None, "tiny", "host:1", None) is None
    with pytest.raises(BadValue, match="--switch-roles"):
        parse_serving(None, "tiny", "host:1", None, switch_roles=True)
    with pytest.raises(BadValue, match="--layer-groups: got 2, want beside --pd only"):
        parse_serving(None, "tiny", "host:1", None, layer_groups=2)


@pytest.mark.parametrize("shape", ["", "p2d", "0p1d", "1p0d", "1d2p", "1p2d3", "100p1d", "1p"])
def test_another_shape_is_refused(shape: str) -> None:
    with pytest.raises(BadValue, match="as in 1p2d"):
        parse_serving(shape, "tiny", "host:1", None)


def test_the_models_are_those_that_workers_load() -> None:
    assert MODELS == engine_options.MODELS


def test_another_model_is_refused() -> None:
    with pytest.raises(BadValue, match="--model: got 'big', want one of smollm, tiny"):
        parse_serving("1p1d", "big", "host:1", None)
