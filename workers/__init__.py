"""Workers: lend memory, move and hold bytes; prefill and decode workers."""
