"""atsc's own version."""

from __future__ import annotations

import importlib.metadata


def atsc_version() -> str:
    """The installed version; `source` where the packages run from a checkout, not installed."""
    try:
        return importlib.metadata.version("atsc")
    except importlib.metadata.PackageNotFoundError:
        return "source"
