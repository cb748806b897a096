"""Models and tokenizers: how text becomes token ids, and where the default checkpoint comes from."""
