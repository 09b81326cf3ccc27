"""The master's HTTP pages over loopback: what they say."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING

import aiohttp

from kvstore.wire.messages.reads import (
    PinTotals,
    SegmentStatus,
    Status,
    StoredChunks,
    StripeTotals,
    TierStatus,
    WorkerStatus,
)
from master.admin import admin_pages
from master.metrics import LagHistogram, ShellCounts, exposition

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    Get = Callable[[str], Awaitable[aiohttp.ClientResponse]]

STATUS = Status(
    cluster="c",
    epoch=4,
    uptime_s=1.5,
    pages=10,
    runs=2,
    namespaces=1,
    sessions=3,
    open_plans=0,
    workers=(
        WorkerStatus("w", "h", "live", 0.1, ("tcp:127.0.0.1:1",)),
        WorkerStatus("x", "h", "lost", 9.0, ()),
    ),
    segments=(SegmentStatus("w-dram", "w", "dram", 100, 50, 10, 30, 7, 3, "serving", ""),),
    tiers=(TierStatus("dram", 1, 100, 50, 4, 8, 3, 2, 2000, 1000),),
    counters={"hits": 8, "misses": 2, "chunk_rows_written": 64, "chunk_bytes_written": 2648},
    pins=PinTotals(2, 9, 4096, 12_288),
    stored=StoredChunks(5, 2, 0.25),
    stripes=StripeTotals(7, 8192, 1),
)


def counts() -> ShellCounts:
    made = ShellCounts()
    made.note_request("Probe", 0.25)
    made.note_request("Probe", 0.25)
    made.lag.note(0.002)
    made.is_persisting = False
    made.terms, made.renewals_failed, made.lease_left_s = 2, 3, 1.5
    return made


def serve(use: Callable[[Get], Awaitable[None]]) -> None:
    """Serve the pages on a free port while `use` asks for them."""

    async def life() -> None:
        pages = admin_pages(lambda: (STATUS, counts()))
        address = await pages.listen("127.0.0.1:0", None)
        try:
            async with aiohttp.ClientSession(f"http://{address}") as client:
                await use(client.get)
        finally:
            await pages.close()

    asyncio.run(life())


def test_health_tells_what_is_wrong() -> None:
    async def use(get: Get) -> None:
        answer = await get("/health")
        assert answer.status == 200
        assert await answer.json() == {
            "serving": True,
            "standing": "leading",
            "persisting": False,
            "cluster": "c",
            "epoch": 4,
        }

    serve(use)


def test_status_is_the_whole_status() -> None:
    async def use(get: Get) -> None:
        found = json.loads(await (await get("/status")).text())
        assert found["pages"] == 10
        assert found["counters"] == STATUS.counters

    serve(use)


def test_metrics_are_prometheus_text() -> None:
    async def use(get: Get) -> None:
        answer = await get("/metrics")
        assert answer.content_type == "text/plain"
        lines = (await answer.text()).splitlines()
        for line in (
            'kvharbor_master_standing{standing="leading"} 1.0',
            'kvharbor_master_standing{standing="in doubt"} 0.0',
            "kvharbor_master_lease_seconds 1.5",
            "kvharbor_master_terms_total 2.0",
            "kvharbor_master_renewals_failed_total 3.0",
            "kvharbor_master_pages 10.0",
            'kvharbor_workers{state="live"} 1.0',
            'kvharbor_workers{state="joining"} 0.0',
            'kvharbor_master_events_total{kind="hits"} 8.0',
            'kvharbor_segment_bytes{segment="w-dram",state="sealed",tier="dram",worker="w"} 30.0',
            'kvharbor_tier_extents{tier="dram"} 4.0',
            'kvharbor_tier_hits_total{tier="dram"} 8.0',
            'kvharbor_tier_copies_evicted_total{tier="dram"} 3.0',
            'kvharbor_tier_moved_bytes_total{tier="dram"} 2000.0',
            "kvharbor_pins 2.0",
            "kvharbor_stripes 7.0",
            "kvharbor_stripes_waiting 1.0",
            "kvharbor_parity_bytes 8192.0",
            "kvharbor_metadata_chunks 5.0",
            "kvharbor_metadata_chunks_dirty 2.0",
            "kvharbor_metadata_behind_seconds 0.25",
            "kvharbor_metadata_failing 1.0",
            "kvharbor_metadata_rows_written_total 64.0",
            "kvharbor_metadata_bytes_written_total 2648.0",
            "kvharbor_metadata_values_set_aside_total 0.0",
            "kvharbor_pinned_pages 9.0",
            'kvharbor_pinned_bytes{kind="soft"} 4096.0',
            'kvharbor_pinned_bytes{kind="hard"} 12288.0',
            'kvharbor_master_requests_total{message="Probe"} 2.0',
            'kvharbor_master_request_seconds_total{message="Probe"} 0.5',
            'kvharbor_master_loop_lag_seconds_bucket{le="0.001"} 0.0',
            'kvharbor_master_loop_lag_seconds_bucket{le="0.005"} 1.0',
            'kvharbor_master_loop_lag_seconds_bucket{le="+Inf"} 1.0',
        ):
            assert line in lines, line

    serve(use)


def test_lag_is_counted_by_how_late_it_was() -> None:
    lag = LagHistogram()
    for seconds in (-1.0, 0.0, 0.001, 0.03, 0.03, 5.0):
        lag.note(seconds)
    assert [count for _, count in lag.cumulative()] == [3, 3, 3, 5, 5, 5, 6]
    assert lag.worst_s == 5.0


def test_metrics_name_no_client() -> None:
    text = exposition(lambda: (STATUS, counts())).decode()
    assert "tenant" not in text
