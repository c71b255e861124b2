"""atsc: compile large language models to per-device execution plans, and run them."""

__version__ = "0.1.0"
