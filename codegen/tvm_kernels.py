"""Kernels of the long tail: one ONNX node to C++ through TVM, at compile time only.

A plan never needs TVM; the compiler needs it where a node has no template and the cache does not
have its kernel. TVM runs in a child process (tvm_worker.py), since it can crash; there each kernel
is compared with onnx's reference evaluator before anybody gets it. What came of a request, kernel
or refusal, is cached by its content beside compiled objects.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib.util
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx

from atsc.codegen.tail import TailKernel, TensorType
from atsc.codegen.toolchain import cache_dir
from atsc.codegen.tvm_check import FLAGS, name_of
from atsc.codegen.tvm_request import Answer, Request, request_of
from atsc.compiler.errors import CodegenError

TVM_VERSION = "0.27.0.post1"
"""What `atsc[tvm]` pins: the lowering uses what TVM calls internal, which changes by release."""
NOT_GENERATED = frozenset(
    {
        "Conv", "ConvTranspose", "ConvInteger", "DeformConv", "Gemm", "MatMul", "MatMulInteger",
        "QLinearConv", "QLinearMatMul",
    }
)  # fmt: skip
"""Operators whose unscheduled loops are no answer: 15 to 20 times slower than tuned ones."""
_INVENTED = frozenset(
    {
        "Bernoulli", "If", "Loop", "Multinomial", "NonZero", "RandomNormal", "RandomNormalLike",
        "RandomUniform", "RandomUniformLike", "Scan", "SequenceMap", "StringNormalizer", "Unique",
    }
)  # fmt: skip
"""Operators that no random data can check, or whose result's size depends on data."""
_DIVIDING = frozenset({"Div", "Mod"})
"""TVM's kernels of integers end the process where they divide by zero."""
_TIMEOUT_SECONDS = 120.0


def is_installed() -> bool:
    """Whether TVM could be asked; its version is checked when it is."""
    return importlib.util.find_spec("tvm") is not None


def tvm_kernel(
    node: onnx.NodeProto,
    opset: int,
    inputs: Sequence[TensorType | None],
    outputs: Sequence[TensorType],
    constants: Mapping[int, np.ndarray],
) -> TailKernel:
    """The checked kernel of a node of the default domain.

    Args:
        node: the node; functions are expanded and constants folded before.
        opset: the version of the operators.
        inputs: the type of each input, None where one is left out.
        outputs: the type of each output.
        constants: values of inputs, by index, that become part of the kernel; all other inputs are
            its tensors, in order.

    Raises:
        CodegenError: TVM cannot make it, makes it wrong, or is not installed. Says what and why.
    """
    what = f"node {node.name or node.output[0]} ({node.op_type}, opset {opset})"
    if node.op_type in NOT_GENERATED or node.op_type in _INVENTED:
        raise CodegenError(f"{what}: not an operator that is generated through TVM")
    if node.op_type in _DIVIDING and not outputs[0].dtype.startswith("float"):
        raise CodegenError(f"{what}: integers are not divided through TVM")
    if any(name == "" for name in node.output):
        raise CodegenError(f"{what}: outputs that are left out are not supported")
    try:
        request = request_of(node, opset, inputs, outputs, constants)
        answer = _cached(request)
    except CodegenError as error:
        raise CodegenError(f"{what}: {error}") from None
    if answer.refusal:
        raise CodegenError(f"{what}: {answer.refusal}")
    name = name_of(request)
    return TailKernel(
        name,
        answer.source.replace("NAME", name),
        request.inputs,
        request.outputs,
        request.symbols,
        answer.grid,
        answer.workspace_bytes,
        flags=FLAGS,
    )


def _cached(request: Request) -> Answer:
    key = hashlib.sha256(f"{_generator()}\0{request.to_text()}".encode()).hexdigest()
    path = cache_dir() / "tvm" / key[:2] / f"{key}.json"
    with contextlib.suppress(OSError, ValueError, KeyError):
        return Answer.from_text(path.read_text("utf-8"))
    answer = _child().ask(request)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(answer.to_text())
    os.replace(file.name, path)
    return answer


@functools.cache
def _generator() -> str:
    """A digest of all that an answer depends on but the request."""
    digest = hashlib.sha256(f"{TVM_VERSION} {onnx.__version__}".encode())
    for path in sorted(Path(__file__).parent.glob("tvm_*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _child() -> _Child:
    child = _Child()
    atexit.register(child.stop)
    return child


@dataclass(slots=True)
class _Child:
    """The process that has TVM; started when it is first asked, and again after a crash."""

    process: subprocess.Popen[str] | None = None

    def ask(self, request: Request) -> Answer:
        """What it answers; a crash is a refusal.

        Raises:
            CodegenError: TVM is missing or another version, or the answer takes too long.
        """
        process = self._running()
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(request.to_text() + "\n")
            process.stdin.flush()
            ready, _, _ = select.select([process.stdout], [], [], _TIMEOUT_SECONDS)
            line = process.stdout.readline() if ready else None
        except BrokenPipeError:
            line = ""
        if line:
            return Answer.from_text(line)
        self.stop()
        if line is None:
            raise CodegenError(f"TVM took more than {_TIMEOUT_SECONDS:.0f} s")
        return Answer(refusal="TVM crashed")

    def _running(self) -> subprocess.Popen[str]:
        if self.process is not None and self.process.poll() is None:
            return self.process
        _require_tvm()
        environment = {**os.environ, "TVM_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "atsc.codegen.tvm_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        return self.process

    def stop(self) -> None:
        """End it, if it runs."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def _require_tvm() -> None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version("apache-tvm")
    except PackageNotFoundError:
        found = ""
    if found != TVM_VERSION:
        state = f"apache-tvm {found} is installed" if found else "TVM is not installed"
        raise CodegenError(
            f"no template for it, and {state}; pip install 'atsc[tvm]' gets {TVM_VERSION}"
        )
