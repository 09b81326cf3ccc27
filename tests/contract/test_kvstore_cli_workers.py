"""`kvharbor workers` as a program: what it prints, and whom it asks before it does anything."""

from __future__ import annotations

import json

from kvstore.exit_codes import ExitCode
from kvstore.rpc.identity import ListenerIdentity
from kvstore.wire.messages.hello import Done
from tests.contract.cli_rig import ScriptedMaster, kvharbor, refused

FORGET = "workers", "forget", "w1"


def test_a_worker_is_forgotten_by_who_says_that_it_is_meant() -> None:
    text = refused(ExitCode.USAGE, *FORGET)
    assert text == "--yes: got False, want it, where nobody can be asked"
    with ScriptedMaster(ListenerIdentity("c"), Done()) as master:
        done = kvharbor(*FORGET, "--yes", "--master", master.address)
        assert (done.returncode, done.stdout) == (0, "forgotten w1\n"), done.stderr
        done = kvharbor("--json", *FORGET, "--yes", KVHARBOR_MASTER=master.address)
        assert json.loads(done.stdout) == {"forgotten": "w1"}
