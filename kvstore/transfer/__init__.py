"""The data plane as clients see it: buffers, transports, and the choice between them."""
