"""What crosses a process boundary: messages, their encoding, and frames. No I/O."""
