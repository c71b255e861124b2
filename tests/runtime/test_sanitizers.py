"""The runtime under ThreadSanitizer, AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tiny_model import SOURCE, build_program

pytestmark = pytest.mark.toolchain


def _supported(flags: tuple[str, ...], folder: Path) -> bool:
    probe = folder / "probe.cc"
    probe.write_text("int main() { return 0; }\n")
    built = subprocess.run(
        ["c++", *flags, str(probe), "-o", str(folder / "probe")], capture_output=True, check=False
    )
    ran = built.returncode == 0 and subprocess.run([folder / "probe"], check=False).returncode == 0
    return ran


@pytest.mark.parametrize(
    "flags",
    [
        ("-fsanitize=thread",),
        ("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
    ],
    ids=["thread", "address,undefined"],
)
@pytest.mark.parametrize("rungs", [-1, 3], ids=["cpu", "hybrid"])
def test_stress(tiny_folder: Path, tmp_path: Path, flags: tuple[str, ...], rungs: int) -> None:
    if not _supported(flags, tmp_path):
        pytest.skip(f"the compiler cannot build for {flags[0]} here")
    program = tmp_path / "stress"
    build_program([SOURCE.with_name("stress.cc")], program, (*flags, "-O1"), rungs)
    shown = subprocess.run(
        [str(program), str(tiny_folder / "weights.bin"), str(tmp_path / "state")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert (shown.returncode, shown.stdout) == (0, "fine\n"), shown.stderr[-4000:]
    assert "WARNING" not in shown.stderr and "ERROR" not in shown.stderr
