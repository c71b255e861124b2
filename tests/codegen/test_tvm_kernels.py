"""Kernels through TVM: right for open sizes, refused where wrong, cached, and safe from crashes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper

from atsc.codegen import tvm_kernels
from atsc.codegen.tail import ElementType, TensorType
from atsc.codegen.tvm_check import check
from atsc.codegen.tvm_kernels import tvm_kernel
from atsc.codegen.tvm_request import Answer, Request, request_of
from atsc.compiler.dims import Dim, largest
from atsc.compiler.errors import CodegenError

needs_tvm = pytest.mark.skipif(
    not tvm_kernels.is_installed(), reason="TVM is not installed; pip install 'atsc[tvm]'"
)
pytestmark = pytest.mark.toolchain


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATSC_CACHE_DIR", str(tmp_path))


def _type(dtype: ElementType, *shape: int | str | Dim) -> TensorType:
    return TensorType(dtype, tuple(Dim.of(size) for size in shape))


def _resize(mode: str, antialias: int = 0) -> onnx.NodeProto:
    names = ["x", "", "scales"]
    return helper.make_node("Resize", names, ["y"], "up", mode=mode, antialias=antialias)


def test_requests_and_answers_survive_as_text() -> None:
    n = Dim.of("n")
    node = helper.make_node("Add", ["a", "b"], ["c"])
    kinds = [_type("float32", n * 2, largest(n, 3)), _type("float32", 1)]
    request = request_of(node, 18, kinds, kinds[:1], {})
    assert Request.from_text(request.to_text()) == request
    assert request.symbols == ("n",)
    answer = Answer("source", n * 3, n // 4, "")
    assert Answer.from_text(answer.to_text()) == answer


@needs_tvm
def test_a_kernel_of_open_sizes() -> None:
    node = helper.make_node("Einsum", ["x", "y"], ["z"], equation="bij,bjk->bik")
    kinds = [_type("float32", "n", "m", 4), _type("float32", "n", 4, 5)]
    kernel = tvm_kernel(node, 18, kinds, [_type("float32", "n", "m", 5)], {})
    assert kernel.symbols == ("m", "n")
    assert kernel.grid == Dim.of("n") * Dim.of("m") * 5
    assert "TVM" not in kernel.source.split("nest")[-1]


@needs_tvm
def test_several_nests_share_the_workspace() -> None:
    node = helper.make_node("MeanVarianceNormalization", ["x"], ["y"])
    kind = _type("float32", "n", 4, 8, 8)
    kernel = tvm_kernel(node, 18, [kind], [kind], {})
    assert kernel.grid == Dim.of(1)
    assert kernel.workspace_bytes.evaluate({"n": 2}) >= 2 * 4 * 8 * 8 * 4


@needs_tvm
def test_constants_become_part_of_the_kernel() -> None:
    scales = np.array([1, 1, 2, 2], np.float32)
    kinds = [_type("float32", 1, 1, 4, 4), None, _type("float32", 4)]
    kernel = tvm_kernel(_resize("linear"), 18, kinds, [_type("float32", 1, 1, 8, 8)], {2: scales})
    assert kernel.inputs == (kinds[0],)


@needs_tvm
def test_what_tvm_gets_wrong_is_refused_by_name() -> None:
    scales = np.array([1, 1, 0.5, 0.5], np.float32)
    kinds = [_type("float32", 1, 1, 8, 8), None, _type("float32", 4)]
    with pytest.raises(CodegenError, match=r"node up \(Resize, opset 18\): .*reference"):
        tvm_kernel(_resize("linear", 1), 18, kinds, [_type("float32", 1, 1, 4, 4)], {2: scales})


@needs_tvm
def test_what_needs_the_run_time_library_is_refused() -> None:
    node = helper.make_node("TopK", ["x", "k"], ["v", "i"], "top")
    outputs = [_type("float32", 2, 3), _type("int64", 2, 3)]
    with pytest.raises(CodegenError, match=r"node top .*run-time library"):
        tvm_kernel(
            node,
            18,
            [_type("float32", 2, 8), _type("int64", 1)],
            outputs,
            {1: np.array([3], np.int64)},
        )


@needs_tvm
def test_answers_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    node = helper.make_node("CumSum", ["x", "axis"], ["y"])
    kinds = [_type("float32", "n", 5), _type("int64")]
    arguments = (node, 18, kinds, kinds[:1], {1: np.array(1, np.int64)})
    first = tvm_kernel(*arguments)

    def unreachable(self: object, request: Request) -> Answer:
        raise AssertionError("the cache has it")

    monkeypatch.setattr(tvm_kernels._Child, "ask", unreachable)
    assert tvm_kernel(*arguments) == first


@needs_tvm
def test_a_dead_child_is_a_refusal_and_the_next_one_works() -> None:
    child = tvm_kernels._Child()
    kind = _type("float32", 3)
    request = request_of(helper.make_node("Neg", ["x"], ["y"]), 18, [kind], [kind], {})
    process = child._running()
    process.send_signal(signal.SIGSTOP)
    os.kill(process.pid, signal.SIGKILL)
    assert child.ask(request).refusal == "TVM crashed" or child.process is not process
    assert child.ask(request).refusal == ""
    child.stop()


def test_a_missing_or_other_tvm_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tvm_kernels, "TVM_VERSION", "0.0.1")
    with pytest.raises(CodegenError, match=r"pip install 'atsc\[tvm\]' gets 0.0.1"):
        tvm_kernels._require_tvm()


@pytest.mark.parametrize("op", ["MatMul", "Conv", "NonZero"])
def test_operators_that_never_go_through_tvm(op: str) -> None:
    node = helper.make_node(op, ["a", "b"], ["c"], "it")
    kind = _type("float32", 4, 4)
    with pytest.raises(CodegenError, match=f"node it \\({op}"):
        tvm_kernel(node, 18, [kind, kind], [kind], {})


def _negation(body: str) -> tuple[Request, Answer]:
    kind = _type("float32", 64)
    request = request_of(helper.make_node("Neg", ["x"], ["y"]), 18, [kind], [kind], {})
    source = (
        "#include <cstdint>\n"
        'extern "C" int32_t NAME(void* const* tensors, const int64_t*, void*, int64_t lo, '
        "int64_t hi) {\n  auto* x = static_cast<const float*>(tensors[0]);\n"
        f"  auto* y = static_cast<float*>(tensors[1]);\n  {body}\n  return 0;\n}}\n"
    )
    return request, Answer(source, Dim.of(64))


def test_the_check_accepts_what_is_right() -> None:
    check(*_negation("for (int64_t i = lo; i < hi; ++i) y[i] = -x[i];"))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("for (int64_t i = lo; i < hi; ++i) y[i] = x[i];", "differs from the reference"),
        ("for (int64_t i = lo; i < hi; ++i) y[i] = -x[i]; y[64] = 0;", "outside of its tensors"),
        ("y[0] = -x[0]; for (int64_t i = 1; i < hi; ++i) y[i] = y[i - 1] * 0 - x[i]; "
         "if (lo == 0) y[63] = 0;", "differs from the reference"),
        ("(void)x; (void)y; (void)lo; (void)hi; return 1;", "refuses data"),
    ],
)  # fmt: skip
def test_the_check_finds_what_is_wrong(body: str, message: str) -> None:
    with pytest.raises(CodegenError, match=message):
        check(*_negation(body))
