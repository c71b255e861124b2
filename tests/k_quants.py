"""Quantises to K-quants, which gguf-py only reads. Plainly: a scale a block, no search."""

from __future__ import annotations

import numpy as np
from gguf import GGMLQuantizationType as Q

K_TYPES = (Q.Q4_K, Q.Q5_K, Q.Q6_K)


def quantize_k(values: np.ndarray, kind: Q) -> np.ndarray:
    """Rows of a multiple of 256 floats as blocks of `kind`, uint8 [rows, bytes]."""
    rows = len(values)
    if kind is Q.Q6_K:
        blocks = values.reshape(-1, 16, 16)
        wanted = np.abs(blocks).max(axis=-1) / 31
        d = half(wanted.max(axis=-1, keepdims=True) / 127)
        s = np.rint(wanted / d).astype(np.int8)
        q = np.rint(blocks / (d * s)[..., None]).clip(-32, 31) + 32
        return pack_q6_k(q.reshape(-1, 256).astype(np.uint8), s, d).reshape(rows, -1)
    largest = 15 if kind is Q.Q4_K else 31
    blocks = values.reshape(-1, 8, 32)
    low = np.minimum(blocks.min(axis=-1), 0)
    wanted = (blocks.max(axis=-1) - low) / largest
    d = half(wanted.max(axis=-1, keepdims=True) / 63)
    e = half((-low).max(axis=-1, keepdims=True) / 63)
    s, t = np.rint(wanted / d).astype(np.uint8), np.rint(-low / e).astype(np.uint8)
    q = np.rint((blocks + (e * t)[..., None]) / (d * s)[..., None]).clip(0, largest)
    return pack_k(q.reshape(-1, 256).astype(np.uint8), s, t, d, e, kind).reshape(rows, -1)


def half(values: np.ndarray) -> np.ndarray:
    """Rounded to fp16, as float32."""
    return values.astype(np.float16).astype(np.float32)


def fp16_bytes(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float16).reshape(-1, 1).view(np.uint8)


def pack_k(
    q: np.ndarray, s: np.ndarray, t: np.ndarray, d: np.ndarray, e: np.ndarray, kind: Q
) -> np.ndarray:
    """Q4_K or Q5_K of codes [n, 256], s and t [n, 8], d and e [n, 1]."""
    packed = np.zeros((len(q), 12), np.uint8)
    for j in range(4):
        packed[:, j] = s[:, j] | (s[:, j + 4] >> 4 << 6)
        packed[:, j + 4] = t[:, j] | (t[:, j + 4] >> 4 << 6)
        packed[:, j + 8] = (s[:, j + 4] & 15) | ((t[:, j + 4] & 15) << 4)
    groups = (q & 15).reshape(-1, 4, 2, 32)
    nibbles = (groups[:, :, 0] | groups[:, :, 1] << 4).reshape(-1, 128)
    head = [fp16_bytes(d), fp16_bytes(e), packed]
    if kind is Q.Q4_K:
        return np.concatenate([*head, nibbles], axis=1)
    fifth = (q >> 4).reshape(-1, 8, 32)
    high = np.bitwise_or.reduce(fifth << np.arange(8, dtype=np.uint8)[:, None], axis=1)
    return np.concatenate([*head, high, nibbles], axis=1)


def pack_q6_k(q: np.ndarray, s: np.ndarray, d: np.ndarray) -> np.ndarray:
    """Q6_K of codes [n, 256], s int8 [n, 16], d [n, 1]."""
    low, high = (q & 15).reshape(-1, 2, 2, 64), (q >> 4).reshape(-1, 2, 4, 32)
    nibbles = (low[:, :, 0] | low[:, :, 1] << 4).reshape(-1, 128)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    pairs = np.bitwise_or.reduce(high << shifts, axis=2).reshape(-1, 64)
    return np.concatenate([nibbles, pairs, s.view(np.uint8), fp16_bytes(d)], axis=1)
