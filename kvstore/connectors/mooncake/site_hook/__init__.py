"""A folder that the shim puts on PYTHONPATH: Python runs its sitecustomize at every start."""
