"""How much of everything a pool, its prefill and its decode workers need: arithmetic, shown.

Pure: what a model's configuration, a trace and the options say comes in as values.
"""
