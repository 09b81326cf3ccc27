"""The master's HTTP pages for people and monitoring: /health, /status, /metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.admin_http import AdminHttp, Page, json_page
from kvstore.standing import Standing
from master.metrics import exposition

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.wire.messages.reads import Status
    from master.metrics import ShellCounts


def admin_pages(look: Callable[[], tuple[Status, ShellCounts]]) -> AdminHttp:
    """Pages that answer from what `look` returns; /status is what `kvharbor status` prints."""
    return AdminHttp(
        {
            "/health": lambda: _health(*look()),
            "/status": lambda: json_page(look()[0]),
            "/metrics": lambda: Page(exposition(look)),
        }
    )


def _health(status: Status, counts: ShellCounts) -> Page:
    """200 while the process does what it can; a standby, and a leader in doubt, does not serve.

    `persisting` is false while metadata cannot be stored.
    """
    return json_page(
        {
            "serving": status.standing == Standing.LEADING,
            "standing": status.standing,
            "persisting": counts.is_persisting,
            "cluster": status.cluster,
            "epoch": status.epoch,
        }
    )
