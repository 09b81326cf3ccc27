"""Workers: lend memory, move and hold page bytes; the prefill and decode programs."""
