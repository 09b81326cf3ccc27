"""Pure decisions: eviction, admission, placement. No I/O, no clock, no randomness of their own."""
