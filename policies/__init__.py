"""Pure decisions: eviction, placement. No I/O, no clock, no randomness of their own."""
