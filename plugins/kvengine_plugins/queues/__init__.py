"""Built-in queues: the order of the waiting."""
