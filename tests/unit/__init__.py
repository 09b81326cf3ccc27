"""One module at a time: no process, no network, no real clock."""
