"""The master: knows where every page is, grants plans, leases and room; moves no page bytes."""
