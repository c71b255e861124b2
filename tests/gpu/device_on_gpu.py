"""The tests and measurements of the CUDA device without pytest, for a bare machine with a GPU.

PYTHONPATH=.links:tests python3 tests/gpu/device_on_gpu.py SM
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from device_programs import ROUNDS, build_modules, build_program, run_program


def main(sm: int) -> int:
    """Number of tests that failed."""
    failed = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        binaries = build_modules(folder / "binaries", sm)
        ptx = build_modules(folder / "ptx", 75, ptx=True)
        test = build_program("device_test", folder / "device_test")
        measure = build_program("device_measure", folder / "device_measure")
        cases = [(test, rounds, binaries, str(sm)) for test, rounds in ROUNDS.items()]
        for case, rounds, modules, kind in [*cases, ("hand_offs", 100, ptx, "75ptx")]:
            begin = time.monotonic()
            shown = run_program(test, "cuda", case, rounds, modules, kind, timeout=60)
            good = (shown.returncode, shown.stdout) == (0, "fine\n")
            failed += not good
            took = time.monotonic() - begin
            print(f"{'ok    ' if good else 'FAILED'} {case} {rounds} {kind} {took:.1f} s")
            print(shown.stderr[-600:], end="", flush=True)
        shown = run_program(measure, "cuda", binaries, sm, timeout=90)
        print(shown.stdout, shown.stderr, flush=True)
        failed += shown.returncode != 0
    return failed


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
