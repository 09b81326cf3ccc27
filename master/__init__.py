"""The master: knows where every page is; moves no page bytes."""
