"""Pure decisions behind registries: no input or output, no clock, no randomness of their own."""
