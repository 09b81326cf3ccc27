"""The vLLM connector: `connector.KvharborConnector`, which vLLM loads by its module path.

Only `connector.py` and `stats.py` import vLLM. The scheduler's half and the worker's half are
beside them, so that both can be tested without it.
"""
