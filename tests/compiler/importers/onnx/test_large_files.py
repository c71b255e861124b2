"""Files of gigabytes, holes for the most part: what importing them costs, and what is refused."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from mini_decoder import MICROSOFT, MiniDecoder
from onnx import TensorProto

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.onnx import import_onnx

BLOCK = 32
DATA = "big.data"
IMPORT = """
import sys
from pathlib import Path
from atsc.compiler.importers.onnx import import_onnx
from atsc.passes.optimise import optimise

def most_kib():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))

before = most_kib()
graph = optimise(import_onnx(Path(sys.argv[1])))
print(most_kib() - before, sum(weight.num_bytes for weight in graph.weights.values()))
"""


class BigDecoder(MiniDecoder):
    """A decoder whose weights are holes in a file of external data."""

    def __init__(self, width: int) -> None:
        super().__init__(np.zeros((1, 1), np.float32), opset=21)
        self.initializers.clear()
        self.width, self.num_bytes = width, 0
        self.big("table", TensorProto.FLOAT, (6, width))

    def big(self, name: str, element: int, shape: Sequence[int]) -> str:
        tensor = TensorProto(name=name, data_type=element, data_location=TensorProto.EXTERNAL)
        tensor.dims.extend(shape)
        bits = {TensorProto.FLOAT: 32, TensorProto.FLOAT16: 16, TensorProto.UINT8: 8}.get(
            element, 4
        )
        length = int(np.prod(shape, dtype=np.int64)) * bits // 8
        for key, value in {"location": DATA, "offset": self.num_bytes, "length": length}.items():
            tensor.external_data.add(key=key, value=str(value))
        self.num_bytes += length
        self.initializers.append(tensor)
        return name

    def save(self, folder: Path, *, external: bool = False) -> Path:
        with open(folder / DATA, "wb") as file:
            file.truncate(self.num_bytes)
        return super().save(folder, external=external)


def nbits(decoder: BigDecoder, x: str, index: int) -> str:
    """MatMulNBits with packed zero points."""
    width, blocks = decoder.width, decoder.width // BLOCK
    names = [
        decoder.big(f"codes{index}", TensorProto.UINT8, (width, blocks, BLOCK // 2)),
        decoder.big(f"scales{index}", TensorProto.FLOAT16, (width, blocks)),
        decoder.big(f"points{index}", TensorProto.UINT8, (width, blocks // 2)),
    ]
    return decoder.node(
        "MatMulNBits", [x, *names], [f"y{index}"], MICROSOFT,
        name=f"linear{index}", N=width, K=width, block_size=BLOCK,
    )  # fmt: skip


def qdq(decoder: BigDecoder, x: str, index: int) -> str:
    """int4 behind DequantizeLinear, which stores a matrix the other way round, and a norm."""
    width = decoder.width
    shape = (width // BLOCK, width)
    names = [
        decoder.big(f"codes{index}", TensorProto.INT4, (width, width)),
        decoder.big(f"scales{index}", TensorProto.FLOAT, shape),
        decoder.big(f"points{index}", TensorProto.INT4, shape),
    ]
    decoder.node(
        "DequantizeLinear", names, [f"w{index}"], name=f"dq{index}", axis=0, block_size=BLOCK
    )
    decoder.node("MatMul", [x, f"w{index}"], [f"product{index}"], name=f"linear{index}")
    return norm_in_pieces(decoder, index)


def halves(decoder: BigDecoder, x: str, index: int) -> str:
    """fp16 that the graph widens and turns round, and a norm."""
    decoder.big(f"codes{index}", TensorProto.FLOAT16, (decoder.width, decoder.width))
    decoder.node(
        "Cast", [f"codes{index}"], [f"wide{index}"], name=f"Cast{index}", to=TensorProto.FLOAT
    )
    decoder.node("Transpose", [f"wide{index}"], [f"w{index}"], name=f"turn{index}", perm=[1, 0])
    decoder.node("MatMul", [x, f"w{index}"], [f"product{index}"], name=f"linear{index}")
    return norm_in_pieces(decoder, index)


def norm_in_pieces(decoder: BigDecoder, index: int) -> str:
    """A norm whose proof asks for the shape of the product before it."""
    decoder.big(f"gain{index}", TensorProto.FLOAT, (decoder.width,))
    for name, value in (("two", np.float32(2)), ("tiny", np.float32(1e-6)), ("last", [-1])):
        decoder.constant(f"{name}{index}", np.array(value))
    for op, inputs, output in (
        ("Pow", ["product", "two"], "squares"),
        ("ReduceMean", ["squares", "last"], "mean"),
        ("Add", ["mean", "tiny"], "sum"),
        ("Sqrt", ["sum"], "root"),
        ("Div", ["product", "root"], "unit"),
        ("Mul", ["unit", "gain"], "y"),
    ):
        names = [f"{name}{index}" for name in inputs]
        decoder.node(op, names, [f"{output}{index}"], name=f"{op}{index}")
    return f"y{index}"


@pytest.mark.parametrize(
    ("linear", "width"), [(nbits, 56 << 10), (qdq, 56 << 10), (halves, 28 << 10)]
)
def test_import_and_passes_read_no_weight(
    tmp_path: Path, linear: Callable[[BigDecoder, str, int], str], width: int
) -> None:
    """In a process of its own, by its resident memory: tracemalloc does not see every byte."""
    decoder = BigDecoder(width)
    x = "x"
    for index in range(2):
        x = linear(decoder, x, index)
    decoder.node("Relu", [x], ["logits"])
    path = decoder.save(tmp_path)
    done = subprocess.run([sys.executable, "-c", IMPORT, path], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    grown_kib, num_bytes = map(int, done.stdout.split())
    assert num_bytes > 3 << 30
    assert grown_kib < 64 << 10


def inline(folder: Path, field: int, tail: bytes, size: int) -> Path:
    """A decoder in one file whose last tensor has `size` bytes, a hole, in `field`."""
    decoder = MiniDecoder(np.ones((6, 64), np.float32))
    decoder.node("MatMul", ["x", "w"], ["logits"])
    path = decoder.save(folder)
    graph = decoder.model().graph.SerializeToString()
    model = decoder.model()
    model.ClearField("graph")
    tensor = TensorProto(name="w", data_type=TensorProto.FLOAT)
    tensor.dims.extend((64, size // 256))
    inner = tensor.SerializeToString() + bytes_head(field, size)
    middle = bytes_head(5, len(inner) + size) + inner
    head = bytes_head(7, len(graph) + len(middle) + size) + graph + middle
    with open(path, "wb") as file:
        start = file.write(model.SerializeToString() + head)
        file.truncate(start + size)
        file.seek(start + size - len(tail))
        file.write(tail)
    return path


def bytes_head(field: int, size: int) -> bytes:
    """A protobuf field's tag and length."""
    out = bytearray([field << 3 | 2])
    while size >= 128:
        out.append(size & 127 | 128)
        size >>= 7
    return bytes([*out, size])


def test_weights_of_3_gib_inside_the_file(tmp_path: Path) -> None:
    """No message of that size can be parsed; its weights are read where they are."""
    path = inline(tmp_path, 9, np.float32(7).tobytes(), 3 << 30)
    data = import_onnx(path).weights["w"].parts["data"].read()
    assert data.shape == (3 << 22, 64)
    assert (data[-1, -1], data[5, 5], data[0, 0]) == (7, 0, 0)


@pytest.mark.parametrize("field", [4, 12])
def test_other_fields_of_3_gib(tmp_path: Path, field: int) -> None:
    """float_data and doc_string: refused before they are copied."""
    reason = "2 GiB or more in one message; save it with its weights in external data"
    path = inline(tmp_path, field, b"", 3 << 30)
    with pytest.raises(ModelError, match=rf"^{path}: not an ONNX model \({reason}\)$"):
        import_onnx(path)


def test_3_gib_of_zeros(tmp_path: Path) -> None:
    """What a download that reserved its space and broke off leaves behind."""
    path = tmp_path / "model.onnx"
    with open(path, "wb") as file:
        file.truncate(3 << 30)
    with pytest.raises(ModelError, match=r"model\.onnx: not an ONNX model \([^\n]*\)$"):
        import_onnx(path)
