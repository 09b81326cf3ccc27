"""The operator's commands: `kvharbor up | status | wipe | demo | debug | version`."""
