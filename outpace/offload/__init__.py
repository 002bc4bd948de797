"""Offload: runs models larger than the device by streaming layers from host memory or disk."""
