"""attention: causal grouped-query attention over the layer's KV cache, which it extends.

Per new token m at position p = position + m, per head h with its K/V head g = h * kv_heads / heads:

    q = rope(rms_norm(q)); k = rope(rms_norm(k))      each only if its inputs are given
    cache[p] = fp16(k), fp16(v)
    s[t] = scale * q . K[t]          for max(0, p - window + 1) <= t <= p   (window 0: from 0)
    s    = softcap * tanh(s / softcap)                if softcap > 0, before the mask
    y    = softmax(s) V              with the head's sink logit in the denominator, if given

Shapes: q [M, heads * head_size], k and v [M, kv_heads * head_size]; or q, k, v packed in this order
along columns in the first input, k and v absent. cos and sin [max position, rotary_dim / 2];
q_norm and k_norm [head_size]; sinks [heads]; y [M, heads * head_size] float32.
Source: com.microsoft GroupQueryAttention; ONNX Attention-23. Numbers: DESIGN (KV cache fp16).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atsc.compiler.errors import ModelError
from atsc.compiler.ir import LOGIT_ROWS, DType, TensorType
from atsc.compiler.ops import REQUIRED, Attrs, Cost, OpDef, Operand, RoundState, Sample
from atsc.compiler.ops.linear import random_float_weight
from atsc.compiler.ops.rope import rotate
from atsc.compiler.weights import dequantize

F32Array = NDArray[np.float32]


def _infer(attrs: Attrs, inputs: Sequence[Operand]) -> tuple[TensorType, ...]:
    q = inputs[0]
    assert isinstance(q, TensorType)
    if q.shape[0] == LOGIT_ROWS:
        raise ModelError("the rows whose logits are wanted are no contiguous sequence")
    heads, kv_heads, size = (int(attrs[key]) for key in ("num_heads", "kv_heads", "head_size"))
    if heads % kv_heads or size % 8:
        raise ModelError(
            f"attention of {heads} heads of size {size} on {kv_heads} KV heads: heads must be a "
            "multiple of KV heads, and the size of 8"
        )
    width, kv_width = heads * size, kv_heads * size
    packed = len(inputs) < 2 or inputs[1] is None
    expected = [width + 2 * kv_width] if packed else [width, kv_width, kv_width]
    found = [operand.shape[-1] for operand in inputs[: len(expected)] if operand is not None]
    if found != expected:
        raise ModelError(f"rows of {found} for q, k, v of {expected}")
    return (TensorType(DType.F32, (*q.shape[:-1], width)),)


def _normalise(x: F32Array, weight: Any, eps: float) -> F32Array:
    if weight is None:
        return x
    wide = x.astype(np.float64)
    rms = np.sqrt((wide**2).mean(axis=-1, keepdims=True) + eps)
    y: F32Array = (wide / rms * dequantize(weight)).astype(np.float32)
    return y


def _reference(attrs: Attrs, inputs: Sequence[Any], state: RoundState) -> tuple[Any, ...]:
    q, k, v, cos, sin, q_norm, k_norm, sinks = [*inputs, *[None] * 8][:8]
    heads, kv_heads = int(attrs["num_heads"]), int(attrs["kv_heads"])
    size, eps = int(attrs["head_size"]), float(attrs["qk_norm_eps"])
    rows, start = len(q), state.position
    if k is None:
        q, k, v = np.split(q, [heads * size, (heads + kv_heads) * size], axis=1)
    q = _normalise(q.reshape(rows, heads, size), q_norm, eps)
    k = _normalise(k.reshape(rows, kv_heads, size), k_norm, eps)
    v = v.reshape(rows, kv_heads, size)
    if cos is not None:
        angles = slice(start, start + rows)
        turn = dequantize(cos)[angles], dequantize(sin)[angles], bool(attrs["interleaved"])
        q, k = rotate(q, *turn), rotate(k, *turn)
    empty = np.zeros((0, kv_heads, size), np.float32)
    past_k, past_v = state.caches.get(int(attrs["layer"]), (empty, empty))
    keys = np.concatenate([past_k[:start], k.astype(np.float16).astype(np.float32)])
    values = np.concatenate([past_v[:start], v.astype(np.float16).astype(np.float32)])
    state.caches[int(attrs["layer"])] = keys, values

    group = heads // kv_heads
    scores = np.einsum(
        "mhd,thd->hmt", q.astype(np.float64), np.repeat(keys, group, 1).astype(np.float64)
    ) * float(attrs["scale"])
    softcap = float(attrs["softcap"])
    if softcap > 0:
        scores = softcap * np.tanh(scores / softcap)
    position, token = np.arange(start, start + rows)[:, None], np.arange(len(keys))[None, :]
    visible = token <= position
    if int(attrs["window"]):
        visible &= token > position - int(attrs["window"])
    scores = np.where(visible, scores, -np.inf)
    largest = scores.max(axis=-1, keepdims=True)
    if sinks is not None:
        sink = dequantize(sinks).astype(np.float64)[:, None, None]
        largest = np.maximum(largest, sink)
    weights = np.exp(scores - largest)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sink - largest)
    y = np.einsum("hmt,thd->mhd", weights / total, np.repeat(values, group, 1).astype(np.float64))
    return (y.reshape(rows, heads * size).astype(np.float32),)


def _cost(attrs: Attrs, inputs: Sequence[Operand], rows: int, context: int) -> Cost:
    heads, size = int(attrs["num_heads"]), int(attrs["head_size"])
    window = int(attrs["window"]) or context
    tokens = min(context, window + rows - 1)
    seen = rows * tokens - rows * (rows - 1) // 2  # a row sees no later ones; of a window, at most
    kv_bytes = 2 * 2 * int(attrs["kv_heads"]) * size
    width = 4 * rows * size
    return Cost(
        flops=4 * heads * size * seen,
        bytes_read=kv_bytes * tokens + width * (heads + 2 * int(attrs["kv_heads"])),
        bytes_written=kv_bytes * rows + width * heads,
    )


def _samples() -> Iterator[Sample]:
    rng = np.random.default_rng(0)
    shapes = ((6, 2, 64, 0), (6, 2, 80, 24), (3, 3, 96, 0), (8, 2, 128, 24), (4, 1, 256, 0))
    for heads, kv_heads, size, window in shapes:
        softcap = 30.0 if size == 80 else 0.0
        for rows, past in ((1, 0), (1, 23), (1, 300), (3, 17), (8, 40), (17, 0), (64, 100)):
            yield random_sample(rng, heads, kv_heads, size, rows, past, window, softcap)
    yield random_sample(rng, 4, 4, 64, 5, 5, 0, 0.0, rotary_dim=32, interleaved=True)
    yield random_sample(rng, 4, 1, 64, 20, 0, 8, 0.0, norm=True)
    yield random_sample(rng, 8, 2, 64, 1, 70, 0, 0.0, norm=True, sinks=True)
    yield random_sample(rng, 8, 2, 64, 30, 2, 16, 0.0, packed=False, sinks=True)
    yield random_sample(rng, 9, 3, 64, 1, 2000, 0, 0.0)


def random_sample(
    rng: np.random.Generator,
    heads: int,
    kv_heads: int,
    size: int,
    rows: int,
    past: int,
    window: int,
    softcap: float,
    *,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    norm: bool = False,
    sinks: bool = False,
    packed: bool = True,
) -> Sample:
    """Random inputs for tests; the runner fills the cache with `past` random tokens first."""
    widths = [heads * size, kv_heads * size, kv_heads * size]
    q, k, v = (rng.standard_normal((rows, width), np.float32) for width in widths)
    angles = rng.random((past + rows, (size if rotary_dim is None else rotary_dim) // 2)) * 6
    cos, sin, q_norm, k_norm = (
        random_float_weight(rng, shape, DType.F32, name)
        for name, shape in (
            ("cos", angles.shape),
            ("sin", angles.shape),
            ("q_norm", (size,)),
            ("k_norm", (size,)),
        )
    )
    cos.parts["data"].read()[...] = np.cos(angles)
    sin.parts["data"].read()[...] = np.sin(angles)
    inputs = (
        np.concatenate([q, k, v], 1) if packed else q,
        None if packed else k,
        None if packed else v,
        cos,
        sin,
        q_norm if norm else None,
        k_norm if norm else None,
        random_float_weight(rng, (heads,), DType.F32, "sinks") if sinks else None,
    )
    attrs = {
        "layer": 0,
        "num_heads": heads,
        "kv_heads": kv_heads,
        "head_size": size,
        "scale": size**-0.5,
        "softcap": softcap,
        "window": window,
        "interleaved": interleaved,
        "qk_norm_eps": 1e-6,
    }
    return Sample(attrs, inputs, position=past, tolerance=1e-4)


OPS = (
    OpDef(
        name="attention",
        inputs=("q", "k?", "v?", "cos?", "sin?", "q_norm?", "k_norm?", "sinks?"),
        outputs=("y",),
        attrs={
            "layer": REQUIRED,
            "num_heads": REQUIRED,
            "kv_heads": REQUIRED,
            "head_size": REQUIRED,
            "scale": REQUIRED,
            "softcap": 0.0,
            "window": 0,
            "interleaved": False,
            "qk_norm_eps": 1e-6,
        },
        infer=_infer,
        reference=_reference,
        cost=_cost,
        samples=_samples,
        templates=("attention_decode", "attention_prefill"),
    ),
)
