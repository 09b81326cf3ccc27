"""The control plane: requests and replies with ids and deadlines over TCP and Unix sockets."""
