"""LMCache's objects in a kvharbor pool, by two of its plug points.

`l2_adapter.KvharborL2Adapter` is for its server of many engines, `remote.KvharborRemoteAdapter` for
the cache inside one engine. Only these two modules import LMCache; what they share is beside them.
"""
