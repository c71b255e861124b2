"""Where host and device meet, on random graphs, against a checker that replays their order."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from atsc.codegen import toolchain

pytestmark = pytest.mark.toolchain

SOURCES = (
    Path(__file__).parent / "hybrid" / "splits_test.cc",
    toolchain.RUNTIME_SOURCES / "splits.cc",
)


def test_random_graphs_and_placements(tmp_path: Path) -> None:
    units = [toolchain.Unit(path.stem, path.read_text(), ("-fexceptions",)) for path in SOURCES]
    program = tmp_path / "splits_test"
    objects = map(str, toolchain.compile_units(units))
    command = [*toolchain.find_compiler().command, *objects, "-o", str(program)]
    subprocess.run(command, check=True, capture_output=True)
    shown = subprocess.run([program, "1", "20000"], capture_output=True, text=True, check=False)
    assert (shown.returncode, shown.stdout) == (0, "fine\n"), shown.stderr
