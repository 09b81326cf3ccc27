"""The worker's HTTP pages for people and monitoring: /health, /status, /metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.admin_http import AdminHttp, Page, json_page
from workers.metrics import exposition

if TYPE_CHECKING:
    from collections.abc import Callable

    from workers.metrics import Look

OK: Final = 200
UNAVAILABLE: Final = 503


def admin_pages(look: Callable[[], Look]) -> AdminHttp:
    """Pages that answer from what `look` returns; /status has all that /metrics says."""
    return AdminHttp(
        {
            "/health": lambda: _health(look()),
            "/status": lambda: json_page(look()),
            "/metrics": lambda: Page(exposition(look)),
        }
    )


def _health(look: Look) -> Page:
    """200 while a leader has this worker; 503 while it takes no pages (reads go on)."""
    body = {"serving": look.serving, "fenced": look.fenced, "epoch": look.epoch}
    return json_page(body, OK if look.serving and not look.fenced else UNAVAILABLE)
