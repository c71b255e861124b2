"""How far CUDA kernels may be from the reference beyond what the samples allow."""

from __future__ import annotations

import dataclasses

from atsc.codegen.cuda import CudaKernel
from atsc.compiler.ops import Sample

HALVES_TOLERANCE = {"attention_prefill": 1e-3}
"""Kernels that round operands to fp16 for the tensor cores: queries, scaled by powers of two, and
softmax weights. Each rounding is 1.4e-4 of the operand on average, and scores carry the error of
queries into the weights; sums are fp32. Decoding cuts both in two halves and needs no allowance."""


def with_tolerance(sample: Sample, kernel: CudaKernel) -> Sample:
    """The sample with the tolerance of a kernel."""
    tolerance = HALVES_TOLERANCE.get(kernel.template, sample.tolerance)
    return dataclasses.replace(sample, tolerance=tolerance)
