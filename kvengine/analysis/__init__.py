"""From recorded tables to figures: summaries, and what bound a run."""
