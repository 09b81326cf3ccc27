"""Prefix reuse for Hugging Face transformers: a DynamicCache out of the pool, and back into it.

What a caller needs; ARCHITECTURE.md has the kinds of caches, what is stored of each and why others
are refused.
"""

from kvstore.connectors.transformers.kinds import UnsupportedCache
from kvstore.connectors.transformers.naming import content_of, weights_digest
from kvstore.connectors.transformers.pages import Arriving, LayerCache
from kvstore.connectors.transformers.pooled import PooledPrefix, Prefilled
from kvstore.connectors.transformers.rows import FetchedRows, PooledRows, left_padded

__all__ = [
    "Arriving",
    "FetchedRows",
    "LayerCache",
    "PooledPrefix",
    "PooledRows",
    "Prefilled",
    "UnsupportedCache",
    "content_of",
    "left_padded",
    "weights_digest",
]
