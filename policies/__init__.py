"""Pure decisions: eviction, admission, placement, replication.

No I/O, no clock, no randomness of their own.
"""
