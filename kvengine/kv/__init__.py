"""Memory management over block ids: pools and regions, no tensors and no torch."""
