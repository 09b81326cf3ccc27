"""The SDK: what an inference engine calls. Must not import torch or numpy (tensors.py aside)."""
