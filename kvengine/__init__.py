"""kvengine: an LLM inference engine in which every policy is a plug-in and every decision is recorded."""

__version__ = "0.1.0"
