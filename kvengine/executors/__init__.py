"""What a step yields and how long it takes: nothing real (null), or a model run by torch."""
