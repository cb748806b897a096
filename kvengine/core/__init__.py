"""The nouns of the engine: requests, sequences, plans, results, reasons, limits and errors (stdlib only)."""
