"""Replays a trace of requests through the master's own state machine, under virtual time.

It answers what a pool of so many pages and this policy would have served, and how soon a fleet of
inference workers of that speed. Pure but for reading the
trace: no clock, no socket, no randomness, so a trace and a setting always give the same figures.
"""
