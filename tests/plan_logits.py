"""Logits of an export's plan, on the CPU alone and on the virtual device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from atsc.compiler.driver import CompileOptions, compile_model
from atsc.runtime.loader import load


def plan_logits(
    model: Path, folder: Path, ids: Sequence[int], prompt: int, accuracy_level: int | None = None
) -> Iterator[np.ndarray[Any, Any]]:
    """Logits [len(ids), vocab] without the device, then with it: a prefill, then single steps.

    Args:
        model: what to compile.
        folder: for the plan.
        ids: the tokens.
        prompt: of them, those of the prefill.
        accuracy_level: of linears; None as the model says.
    """
    compile_model(
        CompileOptions(
            model=model,
            output=folder / "m.atsplan",
            ctx=len(ids) + 12,
            chunk=64,
            accuracy_level=accuracy_level,
            target="virtual",
            vram_bytes=64 << 20,
        )
    )
    for device in (False, True):
        with (
            load(folder / "m.atsplan", device=device, threads=2) as plan,
            plan.session() as session,
        ):
            assert (plan.device_name is not None) == device
            rows = [session.prefill(ids[:prompt], logits="all")]
            rows += [session.decode(token)[None] for token in ids[prompt:]]
        yield np.concatenate(rows)
