"""What operators ask and change of the policies in force, and keeping it for later masters.

Owns the keys `policies/<kind>`. What an operator has set outranks the configuration of this master
and of those that follow it, until it is reset.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.errors import BadValue, MalformedMessage
from kvstore.wire.encoding import decode, encode
from kvstore.wire.messages.operator import PoliciesInForce, SetPolicy
from master import heat, stripe_making

if TYPE_CHECKING:
    from kvstore.wire.messages.operator import GetPolicies, ResetPolicy
    from master.core import Core
    from master.in_force import InForce
    from master.sessions import Caller
    from policies.parameters import Parametrised

PREFIX: Final = "policies/"


def get_policies(core: Core, caller: Caller, _message: GetPolicies) -> None:
    """Answer PoliciesInForce."""
    caller.session.must_be_operator()
    core.reply(caller, _in_force(core))


def set_policy(core: Core, caller: Caller, message: SetPolicy) -> None:
    """Take another policy or other parameters; answer PoliciesInForce once that is durable."""
    caller.session.must_be_operator()
    policy = _of_kind(core, message.kind)
    if policy is core.erasure:
        stripe_making.check_wish(core, message)
    policy.change(message.name, message.parameters)
    row = policy.row()
    kept = SetPolicy(row.kind, row.name, {name: str(v) for name, v in row.parameters.items()})
    _changed(core)
    core.note(f"policy of {row.kind}: {row.name} with {row.parameters}, as an operator wishes")
    answer = _in_force(core)
    core.persist(((PREFIX + row.kind, encode(kept)),), (), lambda: core.reply(caller, answer))


def reset_policy(core: Core, caller: Caller, message: ResetPolicy) -> None:
    """Go back to what is configured; answer PoliciesInForce once that is durable."""
    caller.session.must_be_operator()
    _of_kind(core, message.kind).reset()
    _changed(core)
    core.note(f"policy of {message.kind}: as configured, as an operator wishes")
    answer = _in_force(core)
    core.persist((), (PREFIX + message.kind,), lambda: core.reply(caller, answer))


def restore(core: Core, key: str, value: bytes) -> None:
    """Take in one durable value. What this version does not know is counted: as configured, then.

    A master that refused to start for it would leave nobody to reset it.
    """
    try:
        message = decode(value)
        if not isinstance(message, SetPolicy):
            raise MalformedMessage(type(message).__name__)
        _of_kind(core, key.removeprefix(PREFIX)).change(message.name, message.parameters)
    except (BadValue, MalformedMessage):
        core.counters["policies_not_restored"] += 1


def _of_kind(core: Core, kind: str) -> InForce[Parametrised]:
    found = core.policies.get(kind)
    if found is None:
        raise BadValue("kind", kind, f"one of {', '.join(core.policies)}")
    return found


def _in_force(core: Core) -> PoliciesInForce:
    return PoliciesInForce(tuple(each.row() for each in core.policies.values()))


def _changed(core: Core) -> None:
    """What was made by the policies before is made anew."""
    core.rankings.clear()
    core.tell_size()
    core.stripes.look(core.now)
    heat.policy_changed(core)
