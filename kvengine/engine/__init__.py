"""The step loop and what it is made of: intake, scheduling context, commit, clock, driver."""
