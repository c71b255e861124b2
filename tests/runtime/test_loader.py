"""Opening plans: what is refused, what is found in damaged weights, and what gets imported."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tiny_model import CONTEXT, EOS, OFFSETS, build_plan, make_weights, reference, save_manifest

from atsc.compiler.errors import DeviceError, PlanError, UsageError
from atsc.runtime.loader import load

pytestmark = pytest.mark.toolchain


def test_what_a_plan_says_of_itself(tiny_folder: Path) -> None:
    with load(str(tiny_folder)) as plan:
        assert (plan.model_name, plan.vocab_size, plan.context_length) == ("tiny", 32, CONTEXT)
        assert (plan.bos_token_id, plan.eos_token_ids, plan.isa) == (1, (EOS,), "avx2")
        assert plan.directory == tiny_folder and plan.num_threads >= 1
        assert plan.cache_bytes >= 2 * 2 * 16 * (CONTEXT + 15)


def test_damaged_unit_is_named(tiny_copy: Path) -> None:
    """A flipped bit: found when weights are read or verified, not when they are only mapped."""
    weights = tiny_copy / "weights.bin"
    content = bytearray(weights.read_bytes())
    content[OFFSETS[2] + 100] ^= 4
    weights.write_bytes(content)
    load(tiny_copy).close()
    for options in ({"verify": True}, {"mmap": False}):
        for threads in (1, 3):
            with pytest.raises(PlanError, match=r"weights\.bin: unit w2 is damaged \(crc32"):
                load(tiny_copy, threads=threads, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("options", [{"verify": True}, {"mmap": False}])
def test_whole_weights_pass(tiny_folder: Path, options: dict[str, bool]) -> None:
    with load(tiny_folder, threads=2, **options) as plan:  # type: ignore[arg-type]
        expected = reference([1, 2, 3], make_weights())
        np.testing.assert_allclose(plan.forward([1, 2, 3]), expected, rtol=1e-4, atol=1e-3)


def test_altered_library_is_not_loaded(tiny_copy: Path) -> None:
    library = tiny_copy / "libplan.so"
    library.write_bytes(library.read_bytes() + b"\0")
    with pytest.raises(PlanError, match=r"libplan\.so: too long"):
        load(tiny_copy)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"no library", "cannot be loaded"), (None, "belongs to another plan")],
)
def test_a_library_that_does_not_belong(
    tiny_copy: Path, content: bytes | None, message: str
) -> None:
    """The manifest fits the files, and still the library is not this plan's."""
    if content is not None:
        (tiny_copy / "libplan.so").write_bytes(content)
    save_manifest(tiny_copy, "another")
    with pytest.raises(PlanError, match=message):
        load(tiny_copy)


def test_pinned_manifest(tiny_folder: Path) -> None:
    good = hashlib.sha256((tiny_folder / "plan.json").read_bytes()).hexdigest()
    load(tiny_folder, expected_sha256=good).close()
    with pytest.raises(PlanError, match="expected_sha256"):
        load(tiny_folder, expected_sha256="0" * 64)


def test_bad_options(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, message in (
        ({"threads": 0}, "threads is 0: expected at least 1"),
        ({"threads": 100_000}, "num_threads is 100000: expected 1 to 512"),
        ({"sessions": -1}, "sessions is -1"),
        ({"vram": 1 << 30}, r"CPU alone; leave --vram \(vram=\) out"),
    ):
        with pytest.raises(UsageError, match=message):
            load(tiny_folder, **options)  # type: ignore[arg-type]
    monkeypatch.setenv("ATSC_ISA", "sse9")
    with pytest.raises((UsageError, DeviceError), match="no ISA level is called sse9"):
        load(tiny_folder)
    monkeypatch.setenv("ATSC_ISA", "avx2")
    load(tiny_folder).close()


def test_default_threads_respect_the_affinity(tiny_folder: Path) -> None:
    """In a process of its own, since threads that exist keep what they had."""
    program = (
        "import os, sys\n"
        "from atsc.runtime.loader import load\n"
        "os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:int(sys.argv[2])])\n"
        "print(load(sys.argv[1]).num_threads)\n"
    )
    here = len(os.sched_getaffinity(0))
    for count in {1, here}:
        command = [sys.executable, "-c", program, str(tiny_folder), str(count)]
        shown = subprocess.run(command, capture_output=True, text=True, check=True)
        assert 1 <= int(shown.stdout) <= count


def test_two_plans_in_one_process(tiny_folder: Path, tmp_path: Path) -> None:
    """Same symbols, other tables; also after one is closed and its descriptor is used again."""
    doubled = build_plan(tmp_path / "doubled", "tiny2", factor=2)
    ids = [3, 1, 4, 1, 5]
    for _ in range(3):
        with load(tiny_folder, threads=2) as one, load(doubled, threads=2) as two:
            np.testing.assert_array_equal(2 * one.forward(ids), two.forward(ids))
        with load(doubled, threads=1) as two, load(tiny_folder, threads=1) as one:
            np.testing.assert_array_equal(2 * one.forward(ids), two.forward(ids))


def test_a_library_that_the_system_keeps(tiny_folder: Path, tmp_path: Path) -> None:
    """Libraries are told apart by name, here that of a descriptor, whose number must not recur."""
    flags = ("-Wl,-z,nodelete",)
    kept = build_plan(tmp_path / "kept", "tiny2", factor=2, link_flags=flags)
    load(kept, threads=1).close()
    with load(tiny_folder, threads=1) as plan:
        assert plan.manifest.plan_id == "tiny"
        expected = reference([1, 2], make_weights())
        np.testing.assert_allclose(plan.forward([1, 2]), expected, rtol=1e-4, atol=1e-3)


def test_the_same_plan_twice(tiny_folder: Path) -> None:
    with load(tiny_folder, threads=1) as one:
        with load(tiny_folder, threads=1) as two:
            np.testing.assert_array_equal(one.forward([1, 2]), two.forward([1, 2]))
        one.forward([1, 2])


def test_loading_imports_nothing_of_the_compiler(tiny_folder: Path) -> None:
    program = (
        "import json, sys, atsc\n"
        "plan = atsc.load(sys.argv[1])\n"
        "print(len(list(plan.generate([1, 2], max_new_tokens=4))))\n"
        "print(json.dumps(sorted(sys.modules)))\n"
    )
    shown = subprocess.run(
        [sys.executable, "-c", program, str(tiny_folder)],
        capture_output=True,
        text=True,
        check=True,
    )
    count, modules = shown.stdout.splitlines()
    assert count == "4"
    ours = {name for name in json.loads(modules) if name.startswith("atsc.")}
    assert ours <= {
        "atsc.compiler",
        "atsc.compiler.check_plan",
        "atsc.compiler.errors",
        "atsc.compiler.isa",
        "atsc.compiler.plan",
        "atsc.compiler.plan_json",
        "atsc.runtime",
        "atsc.runtime.capi",
        "atsc.runtime.loader",
        "atsc.runtime.rounds",
        "atsc.runtime.session",
        "atsc.runtime.sizes",
        "atsc.runtime.tensors",
    }
    foreign = {name.partition(".")[0] for name in json.loads(modules)}
    assert not foreign & {"onnx", "onnx_ir", "jinja2", "tokenizers", "gguf", "tvm", "onnxruntime"}
