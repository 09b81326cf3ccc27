"""SGLang's hierarchical cache in a kvharbor pool: see `storage`.

Importing this loads neither SGLang nor torch.
"""
