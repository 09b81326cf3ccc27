"""Where a cluster's durable metadata lives: one port, one adapter a store. For masters only."""
