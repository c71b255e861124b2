"""Imports point down only, and an application that loads a plan loads nothing of the compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("onnx", "onnx_ir", "onnxscript", "jinja2", "gguf", "tokenizers", "onnxruntime", "tvm")


def test_import_contracts() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    if not lint.is_file():
        pytest.skip("import-linter is not installed")
    done = subprocess.run(
        [lint, "--no-cache"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": ".links"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 kept, 0 broken" in done.stdout


def loaded_modules(statement: str) -> set[str]:
    code = f"import sys; {statement}; print('\\n'.join(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import atsc",
        "import atsc.runtime.loader",
        "import atsc.compiler.cli",
        "import atsc.targets.detect",
    ],
)
def test_nothing_heavy_is_loaded(statement: str) -> None:
    assert not loaded_modules(statement) & set(HEAVY)


def test_importing_atsc_loads_not_even_numpy() -> None:
    loaded = loaded_modules("import atsc")
    assert "numpy" not in loaded
    assert {name for name in loaded if name.startswith("atsc.")} == {
        "atsc.compiler",
        "atsc.compiler.errors",
    }


def test_the_loader_loads_the_plan_and_the_errors_of_the_compiler_alone() -> None:
    loaded = loaded_modules("import atsc.runtime.loader")
    assert {name for name in loaded if name.startswith("atsc.compiler.")} == {
        "atsc.compiler.check_plan",
        "atsc.compiler.errors",
        "atsc.compiler.isa",
        "atsc.compiler.plan",
        "atsc.compiler.plan_json",
    }
    forbidden = ("atsc.codegen", "atsc.passes", "atsc.targets")
    assert not [name for name in loaded if name.startswith(forbidden)]


def test_the_manifest_needs_the_standard_library_alone() -> None:
    loaded = loaded_modules("import atsc.compiler.check_plan")
    outside = {
        name.partition(".")[0]
        for name in loaded
        if name.partition(".")[0] not in sys.stdlib_module_names
    }
    assert outside <= {"atsc", "__main__"} | site_modules()


def site_modules() -> set[str]:
    """What the interpreter loads by itself, editable installs included."""
    return {name.partition(".")[0] for name in loaded_modules("pass")}
