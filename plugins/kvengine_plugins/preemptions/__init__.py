"""Built-in preemption mechanisms: how a victim leaves and comes back."""
