"""Who is connected, and what its role and tenant allow."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from kvstore.errors import AccessDenied
from master.events import SessionId
from master.plans import Owner

if TYPE_CHECKING:
    from kvstore.namespace import Content

ENGINE: Final = "engine"
WORKER: Final = "worker"
OPERATOR: Final = "operator"


class Session(msgspec.Struct, eq=False, frozen=True):
    """One connection that passed the handshake."""

    id: SessionId
    role: str
    tenant: str
    name: str
    owner: Owner
    host: str = ""
    """The machine that it runs on, by the name that workers of that machine give."""

    def must_be_worker(self) -> None:
        """Raise AccessDenied unless a pool worker speaks."""
        if self.role != WORKER:
            raise AccessDenied(f"role {self.role}: this is for workers only")

    def must_be_operator(self) -> None:
        """Raise AccessDenied unless an operator speaks."""
        if self.role != OPERATOR:
            raise AccessDenied(f"role {self.role}: this is for operators only")

    def must_own(self, content: Content) -> None:
        """Raise AccessDenied unless this peer may use pages of that content's tenant (I2)."""
        if self.role == WORKER or (self.role == ENGINE and self.tenant != content.tenant):
            raise AccessDenied(f"{self.role} of tenant {self.tenant}: another tenant's namespace")


class Caller(msgspec.Struct, frozen=True):
    """Who gets the answer to one request.

    The collector has to know it: a put that is being planned refers by it to who owns the put.
    """

    session: Session
    request_id: int
