"""Where requests come from: arrival times, lengths, and the packaged demo prompts."""
