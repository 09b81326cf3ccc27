"""What lies in etcd is spoiled, foreign, newer or another cluster's, or etcd is full or away."""

from __future__ import annotations

import base64
import itertools
import json
import urllib.error
from typing import TYPE_CHECKING

import pytest

from kvstore import Stored
from kvstore.exit_codes import ExitCode
from tests.cluster.pages import PAGES
from tests.cluster.rig import Rig, Shape
from tests.cluster.servers import Server, until
from tests.cluster.tcp_proxy import Proxies
from tests.etcd_server import EtcdServers
from workers.drills.ports import free_port

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from tests.cluster.pages import Pages

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

SECRET = "a secret of this test's own"
PASSWORD = "kvharbor's"
MIB = 1 << 20
QUOTA_BYTES = 16 * MIB
JUNK_BYTES = MIB // 2


def text(value: str) -> str:
    """As etcd's JSON pages want it."""
    return base64.b64encode(value.encode()).decode()


def values_below(rig: Rig, family: str) -> list[str]:
    """Keys of the cluster's values of this family."""
    start = f"/kvharbor/{rig.cluster}/{family}/"
    asked = {"key": text(start), "range_end": text(start[:-1] + "0"), "keys_only": True}
    found = rig.etcd.members[0].ask("kv/range", **asked).get("kvs", [])
    return [base64.b64decode(each["key"]).decode() for each in found]


def fill(etcd: EtcdServers) -> None:
    """Write junk until etcd takes no more."""
    for number in itertools.count():
        try:
            etcd.put(f"/junk/{number}", "x" * JUNK_BYTES)
        except urllib.error.HTTPError:
            return


def take_over(rig: Rig) -> str:
    """Kill the leader; what the standby logs while it takes over."""
    standby = rig.masters[rig.standby()]
    before = len(standby.log())
    leader = rig.masters[rig.leader()]
    leader.kill()
    until("the standby leads with its workers", rig.is_serving)
    leader.start()
    return standby.log()[before:]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with Rig(tmp_path_factory.mktemp("rig") / "pool") as made:
        yield made


@pytest.fixture
def pages(rig: Rig, request: pytest.FixtureRequest) -> Iterator[Pages]:
    with rig.pages(model=request.node.name) as made:
        yield made


def test_spoiled_chunk_values_are_set_aside_and_their_pages_kept(rig: Rig, pages: Pages) -> None:
    """The worker that holds the pages proves them; of the store only the values are lost."""
    small, large = pages.open(), pages.open(size=128 << 10)
    chains = [(each, each.chain(range(4 * PAGES))) for each in (small, large)]
    for opened, chain in chains:
        pages.store_all(opened, chain)
    until("both chunks' values are there", lambda: len(values_below(rig, "segments")) >= 2)
    spoiled = values_below(rig, "segments")[0]
    rig.etcd.put(spoiled, "spoiled")
    take_over(rig)
    for opened, chain in chains:
        pages.assert_readable(opened, chain)
    (aside,) = values_below(rig, "aside")
    assert aside.endswith(spoiled.partition("segments/")[2])
    assert rig.status(rig.leader()).counters["values_set_aside"] == 1


def test_foreign_keys_below_our_prefix_are_told_of_and_left_alone(rig: Rig, pages: Pages) -> None:
    opened = pages.open()
    chain = opened.chain(range(4 * PAGES))
    pages.store_all(opened, chain)
    stranger = f"/kvharbor/{rig.cluster}/strangers/key"
    rig.etcd.put(stranger, "a stranger's")
    log = take_over(rig)
    pages.assert_readable(opened, chain)
    assert stranger in log
    assert rig.etcd.get(stranger) == "a stranger's"


def test_a_spoiled_value_that_cannot_be_done_without_stops_masters_by_name(
    rig: Rig, pages: Pages
) -> None:
    """Of a namespace, say: what lies in it could be taken for another's. Nothing else is lost."""
    kept = pages.open()
    chain = kept.chain(range(4 * PAGES))
    pages.store_all(kept, chain)
    before = set(values_below(rig, "namespaces"))
    pages.open(size=32 << 10)
    (spoiled,) = set(values_below(rig, "namespaces")) - before
    rig.etcd.put(spoiled, "spoiled")
    standby = rig.masters[rig.standby()]
    rig.masters[rig.leader()].kill()
    assert standby.wait() == ExitCode.USAGE
    assert spoiled.partition("namespaces/")[2] in standby.log().strip().splitlines()[-1]
    rig.etcd.delete(spoiled)
    rig.heal()
    until("everything is at work again", rig.is_whole)
    pages.assert_readable(kept, chain)


def test_a_full_etcd_stops_storing_and_not_serving(tmp_path: Path) -> None:
    shape = Shape(masters=1, quota_bytes=QUOTA_BYTES)
    with Rig(tmp_path / "pool", shape) as rig, rig.pages() as pages:
        opened = pages.open()
        chain = opened.chain(range(4 * PAGES))
        pages.store_all(opened, chain)
        fill(rig.etcd)
        more = opened.chain([1, 1, 1, 1])
        assert pages.put(opened, more) == [Stored()]
        pages.assert_readable(opened, chain)
        until("the master says so", lambda: "space" in rig.masters[0].log())
        for number in range(QUOTA_BYTES // JUNK_BYTES):
            rig.etcd.delete(f"/junk/{number}")
        rig.etcd.clear_space()
        # Whatever waited is written now: a removal is answered when it is durable.
        assert pages.store.remove(opened, more) == [True]
        rig.masters[0].kill()
        rig.masters[0].start()
        until("the worker is back", rig.is_serving)
        pages.assert_readable(opened, chain)
        assert pages.store.match_prefix(opened, more).pages == 0


# Starts.


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdServers]:
    with EtcdServers(tmp_path_factory.mktemp("etcd")) as made:
        yield made


def master(folder: Path, cluster: Mapping[str, object], **etcd: object) -> Server:
    settings = {
        "name": folder.name,
        "data_dir": str(folder),
        "listen": f"127.0.0.1:{free_port()}",
        "unix": "off",
        "admin": "off",
        "metadata": "etcd",
    }
    return Server("master", folder, {"cluster": cluster, "master": settings, "etcd": etcd})


def refusal(server: Server) -> tuple[int, str]:
    """How a server that was launched ended, and the last line that it said."""
    code = server.wait()
    return code, server.log().strip().splitlines()[-1]


def test_a_second_cluster_of_the_same_name_is_refused(tmp_path: Path, etcd: EtcdServers) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o600)
    first = master(tmp_path / "first", {"name": "twice"}, endpoints=list(etcd.addresses))
    first.start()
    stranger = {"name": "twice", "secret_file": str(secret)}
    second = master(tmp_path / "second", stranger, endpoints=list(etcd.addresses))
    second.launch()
    code, said = refusal(second)
    assert code == ExitCode.USAGE
    assert "two clusters are called 'twice'" in said
    assert first.end() == 0


def test_a_newer_layout_is_refused(tmp_path: Path, etcd: EtcdServers) -> None:
    etcd.put("/kvharbor/newer/config", json.dumps({"layout": 99, "secret": ""}))
    etcd.put("/kvharbor/newer/epoch", "1")
    server = master(tmp_path / "m", {"name": "newer"}, endpoints=list(etcd.addresses))
    server.launch()
    code, said = refusal(server)
    assert code == ExitCode.USAGE
    assert "layout 99" in said


def test_a_master_that_starts_without_etcd_waits_for_it(tmp_path: Path, etcd: EtcdServers) -> None:
    with Proxies() as proxies:
        proxy = proxies.front_of(etcd.addresses[0])
        proxy.cut()
        server = master(tmp_path / "m", {"name": "late"}, endpoints=[proxy.address])
        server.start()
        until("it says why", lambda: "does not say who leads" in server.log())
        assert "leading" not in server.log()
        proxy.heal()
        until("it leads", lambda: "leading in epoch 1" in server.log())
        assert server.end() == 0


def test_wrong_credentials_are_refused(tmp_path: Path) -> None:
    (tmp_path / "etcd").mkdir()
    password = tmp_path / "password"
    password.write_text("not " + PASSWORD)
    password.chmod(0o600)
    with EtcdServers(tmp_path / "etcd") as etcd:
        etcd.require_users("kvharbor", PASSWORD, "/kvharbor/")
        places = list(etcd.addresses)
        login: dict[str, object] = {"user": "kvharbor", "password_file": str(password)}
        servers = [
            master(tmp_path / "wrong", {"name": "a"}, endpoints=places, **login),
            master(tmp_path / "none", {"name": "a"}, endpoints=places),
        ]
        for server in servers:
            server.launch()
        for server in servers:
            code, said = refusal(server)
            assert code == ExitCode.DENIED, said
        password.write_text(PASSWORD)
        server = master(tmp_path / "right", {"name": "a"}, endpoints=places, **login)
        server.start()
        assert server.end() == 0
