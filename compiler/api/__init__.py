"""atsc: compile large language models to per-device execution plans, and run them.

    plan = atsc.load("model.atsplan")
    for token in plan.generate(ids, max_new_tokens=64): ...

Importing this loads nothing of the compiler; `load` needs numpy and the plan alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from atsc.compiler.errors import (
    AtscError,
    BudgetError,
    CancelledError,
    CodegenError,
    DeviceError,
    ModelError,
    PlanError,
    UnsupportedError,
    UsageError,
)

if TYPE_CHECKING:
    from atsc.compiler.driver import Observer
    from atsc.runtime.loader import Plan

__version__ = "0.1.0"

__all__ = [
    "AtscError",
    "BudgetError",
    "CancelledError",
    "CodegenError",
    "DeviceError",
    "ModelError",
    "PlanError",
    "UnsupportedError",
    "UsageError",
    "__version__",
    "compile",
    "load",
]


def compile(
    model: str | os.PathLike[str],
    output: str | os.PathLike[str] | None = None,
    *,
    vram: int | str | None = None,
    headroom: int | str | None = None,
    observer: Observer | None = None,
    **options: Any,
) -> Path | None:
    """Compile a model to a plan folder; needs the extra `atsc[compiler]`.

    Args:
        model: a GGUF or .onnx file, or the folder that holds ONNX with its tokenizer.
        output: the plan folder; by default `model.atsplan` beside the model.
        vram: all that the process may hold of the GPU's memory, in bytes or as "6G"; None: no GPU,
            unless a target or a policy asks for one.
        headroom: of it, what stays free.
        observer: told of stages and progress.
        options: the other fields of `atsc.compiler.driver.CompileOptions`: ctx, chunk, ....

    Returns:
        The plan's folder; None if the option `stop_after` ended the compilation before.

    Raises:
        UsageError: an option is unknown, or makes no sense for this model.
        ModelError: the model cannot be read, or holds something unsupported.
        CodegenError: a kernel cannot be built.
        PlanError: the plan cannot be written.
    """
    from atsc.compiler.driver import CompileOptions, compile_model
    from atsc.runtime.sizes import parse_size

    for name, size in (("vram_bytes", vram), ("headroom_bytes", headroom)):
        if size is not None:
            options[name] = parse_size(size)
    try:
        chosen = CompileOptions(
            model=Path(model), output=Path(output) if output is not None else None, **options
        )
    except TypeError as error:
        raise UsageError(f"compile: {error}; see atsc.compiler.driver.CompileOptions") from None
    return compile_model(chosen, observer)


def load(path: str | os.PathLike[str], **options: Any) -> Plan:
    """Check a plan folder, load its library, and return the plan.

    Args:
        path: the plan folder.
        options: as `atsc.runtime.loader.load` takes them (threads, verify, expected_sha256, ...).

    Raises:
        PlanError: the plan is damaged, or does not fit this machine.
    """
    from atsc.runtime import loader

    return loader.load(Path(path), **options)
