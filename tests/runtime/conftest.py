"""The tiny plan, built once."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tiny_model

from atsc.runtime.loader import Plan, load


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan folder that tests leave as it is; its path has a space and a letter beyond ASCII."""
    return tiny_model.build_plan(tmp_path_factory.mktemp("tiny") / "a plan é.atsplan")


@pytest.fixture
def tiny_copy(tiny_folder: Path, tmp_path: Path) -> Path:
    """A plan folder to damage."""
    return Path(shutil.copytree(tiny_folder, tmp_path / "copy.atsplan"))


@pytest.fixture
def open_tiny(tiny_folder: Path) -> Iterator[Callable[..., Plan]]:
    """Opens the tiny plan with the loader's options; closed after the test."""
    opened: list[Plan] = []

    def open_plan(**options: object) -> Plan:
        opened.append(load(tiny_folder, **options))  # type: ignore[arg-type]
        return opened[-1]

    yield open_plan
    for plan in opened:
        plan.close()
