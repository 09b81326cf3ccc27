"""Pure decisions: eviction, admission, placement, replication, stripes, routing.

No I/O, no clock, no randomness of their own.
"""
