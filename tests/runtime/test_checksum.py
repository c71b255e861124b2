"""The checksum of weights and saved sessions, against its definition."""

from __future__ import annotations

from pathlib import Path

import hybrid_programs
import pytest
from device_programs import run_program


@pytest.mark.toolchain
def test_pieces_of_any_length(tmp_path: Path) -> None:
    program = hybrid_programs.build_program("checksum_test", tmp_path / "checksum_test")
    shown = run_program(program, 5000, 1, timeout=60)
    assert (shown.returncode, shown.stdout) == (0, "fine\n"), shown.stderr[-2000:]
