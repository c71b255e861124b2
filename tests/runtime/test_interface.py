"""The C interface and its number: neither changes alone, and ctypes says what C says."""

from __future__ import annotations

import ctypes
import hashlib
import inspect
import re
import subprocess
from pathlib import Path

import pytest

from atsc.compiler import plan
from atsc.runtime import capi

HEADER = Path(__file__).parents[2] / "runtime" / "include" / "atsc.h"

# Version -> hash of the header's declarations. A header that changed gets another version and
# a line here; a line that was released stays as it is.
VERSIONS = {
    2: "89644f7ce2a3d107b542e66040d61956492f54ea14476de9b6ac592e7d46e1dc",
    3: "08f8f4376c2a52d6730246479de933199f6d23061b6b9fb3647e46dbb42510f8",
    4: "b4c3324b8c5738b0b9877896f511c3abdd3e6cc4172558cec33d758318346405",
}


def _declarations() -> str:
    """The header without comments, spacing and its own numbers."""
    text = re.sub(r"/\*.*?\*/", " ", HEADER.read_text(), flags=re.DOTALL)
    return " ".join(re.sub(r"#define ATSC_API_\w+ \d+u", " ", text).split())


def _number(name: str) -> int:
    found = re.search(rf"#define {name} (\d+)u\n", HEADER.read_text())
    assert found is not None, name
    return int(found[1])


def test_both_sides_have_the_same_number() -> None:
    assert _number("ATSC_API_VERSION") == plan.API_VERSION == max(VERSIONS)
    assert _number("ATSC_API_OLDEST") == plan.API_OLDEST
    assert plan.API_OLDEST in VERSIONS


def test_a_change_of_the_header_has_its_number() -> None:
    digest = hashlib.sha256(_declarations().encode()).hexdigest()
    assert digest == VERSIONS[plan.API_VERSION], (
        "runtime/include/atsc.h changed: raise ATSC_API_VERSION there and API_VERSION in "
        "compiler/plan.py (and the oldest, if a caller of an older one would go wrong), and add "
        f"the new version with {digest} here"
    )


@pytest.mark.toolchain
def test_ctypes_lays_structs_out_as_c_does() -> None:
    """Sizes, offsets and sizes of fields, and the order of the functions."""
    structs = {
        found[1]: cls
        for _, cls in inspect.getmembers(capi, inspect.isclass)
        if (found := re.fullmatch(r"(atsc_\w+)\.", cls.__doc__ or ""))
    }
    declared = set(re.findall(r"typedef struct (atsc_\w+) {", HEADER.read_text()))
    assert set(structs) == declared
    lines = ['#include "atsc.h"']
    for name, cls in structs.items():
        lines.append(f'_Static_assert(sizeof({name}) == {ctypes.sizeof(cls)}, "{name}");')
        for field, *_ in cls._fields_:
            place = getattr(cls, field)
            lines.append(
                f"_Static_assert(offsetof({name}, {field}) == {place.offset} && "
                f'sizeof((({name}*)0)->{field}) == {place.size}, "{name}.{field}");'
            )
    command = ["cc", "-std=c11", f"-I{HEADER.parent}", "-fsyntax-only", "-x", "c", "-"]
    shown = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
