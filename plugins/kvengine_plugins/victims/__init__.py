"""Built-in victim policies: whom to preempt."""
