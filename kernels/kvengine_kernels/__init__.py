"""Attention and cache kernels over a paged KV cache, which know torch and nothing of kvengine."""
