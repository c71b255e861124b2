"""Sizes of memory as people write them."""

from __future__ import annotations

import re

from atsc.compiler.errors import UsageError

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?B)?", re.IGNORECASE)
_FACTORS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def parse_size(size: str | int) -> int:
    """Bytes of `6G` (GiB), `6GiB`, `6GB` (10^9), `800M`, `4096`, or of a number of bytes.

    Raises:
        UsageError: not a size.
    """
    match = _SIZE.fullmatch(str(size).strip())
    if not match:
        raise UsageError(f"{str(size)!r} is no size; write 6G (GiB), 6GB (10^9) or 800M")
    number, prefix, suffix = match.groups()
    base = 1000 if (suffix or "").upper() == "B" else 1024
    return int(float(number) * base ** _FACTORS[prefix.upper()])
