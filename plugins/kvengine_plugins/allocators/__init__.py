"""Built-in allocators: which slots a sequence owns."""
