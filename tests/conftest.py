"""Fixtures that several folders of tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

_REPOSITORY = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def export() -> Callable[[str], Path]:
    """The folder of a public exporter's model: two are in tests/data, the others in ../shared."""

    def find(name: str) -> Path:
        for parent in (_REPOSITORY / "tests/data", _REPOSITORY.parent / "shared/exports"):
            if (parent / name).is_dir():
                return parent / name
        pytest.skip(f"needs ../shared/exports/{name}")

    return find
