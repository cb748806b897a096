"""Built-in admission policies: whether a waiting sequence may enter now."""
