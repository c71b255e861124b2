"""Which ISA level's kernel a node runs with."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from atsc.codegen import toolchain

PROGRAM = """
#include "tables.h"
int main() {
  const atsc::CpuKernel kernel{};
  atsc::NodeEntry node{};
  node.few_rows[0] = node.few_rows[2] = &kernel;
  node.many_rows[0] = node.many_rows[2] = node.many_rows[4] = &kernel;
  const auto level = [&](bool few, unsigned levels) {
    return atsc::highest_level(node, few, levels);
  };
  // Level 4 has kernels for many rows alone: they must not serve few rows.
  if (level(true, 0b11111) != 2 || level(false, 0b11111) != 4) return 1;
  if (level(true, 0b10011) != 0 || level(false, 0b01011) != 0) return 2;
  return level(true, 0b00010) == -1 ? 0 : 3;
}
"""


@pytest.mark.toolchain
def test_a_level_serves_the_rounds_that_it_has_kernels_for(tmp_path: Path) -> None:
    source, program = tmp_path / "levels.cc", tmp_path / "levels"
    source.write_text(PROGRAM)
    includes = [f"-I{folder}" for folder in toolchain.INCLUDE_DIRS]
    command = [*toolchain.find_compiler().command, "-std=c++20", *includes, str(source)]
    subprocess.run([*command, "-o", str(program)], check=True)
    assert subprocess.run([program], check=False).returncode == 0
