"""Test support for policy authors: stand-in models with exact answers, a step log, engines in one call."""
