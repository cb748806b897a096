"""Built-in schedulers: who runs a step, and for how many tokens."""
