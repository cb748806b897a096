"""Models and their tokenizers: what turns text into token ids, and where the default checkpoint comes from."""
