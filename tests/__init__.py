"""Tests by kind: unit, contract, simulation, cluster, tidy."""
