"""The shared language of kvharbor, and the client that an inference engine imports."""
