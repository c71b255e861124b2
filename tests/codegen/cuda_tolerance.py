"""How far CUDA kernels may be from the reference beyond what the samples allow."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from atsc.codegen.cuda import CudaKernel
from atsc.compiler.ops import Sample
from atsc.compiler.ops.quantize import Q8Array

HALVES_TOLERANCE = {"attention_prefill": 1e-3}
"""Kernels that round operands to fp16 for the tensor cores: queries, scaled by powers of two, and
softmax weights. Each rounding is 1.4e-4 of the operand on average, and scores carry the error of
queries into the weights; sums are fp32. Decoding cuts both in two halves and needs no allowance."""


def first_digits(values: Sequence[Any]) -> tuple[Any, ...]:
    """Q8 values without their second digits, which GPU kernels neither make nor read."""
    return tuple(
        dataclasses.replace(value, fine=None) if isinstance(value, Q8Array) else value
        for value in values
    )


def with_tolerance(sample: Sample, kernel: CudaKernel) -> Sample:
    """The sample with the tolerance of a kernel, and first digits alone."""
    tolerance = HALVES_TOLERANCE.get(kernel.template, sample.tolerance)
    return dataclasses.replace(sample, inputs=first_digits(sample.inputs), tolerance=tolerance)
