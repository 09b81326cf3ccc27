"""A model, traffic and hardware that plans are made of. Not a test."""

from __future__ import annotations

from kvstore.namespace import Attention, CacheGroup
from kvstore.planner.kv_bytes import kv_format
from kvstore.planner.sizing import Hardware, Kv
from kvstore.planner.traffic import Lengths, Traffic

SEVEN_B = Kv((CacheGroup(Attention.FULL, 32, 32, 128, 128),), kv_format("float16"), 7e9)
"""The model that articles about separation count with: 32 layers, 32 KV heads of 128."""
TRAFFIC = Traffic(4.0, 4.0, Lengths(800.0, 800.0), Lengths(200.0, 200.0), 0.0)
HARDWARE = Hardware(
    prefill_tokens_per_s=8000.0, decode_batch=16, step_s=0.03, kv_bytes=40 << 30,
    link_bytes_per_s=12.5e9, rtt_s=50e-6, hand_over_s=0.005, ttft_s=0.5, tpot_s=0.05,
)  # fmt: skip
