"""Drills: a deployment of its own is put under load, something of it is broken, and answers,
leftovers and the time to recovery are looked at. `kvharbor drill` runs them.
"""
