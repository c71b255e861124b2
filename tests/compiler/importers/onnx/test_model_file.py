"""Files as users have them: folders, links, damage; and weights that stay on disk."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import onnx
import pytest
from mini_decoder import MiniDecoder
from onnx import TensorProto, helper

from atsc.compiler.errors import ModelError
from atsc.compiler.importers.onnx import import_onnx
from atsc.compiler.weights import dequantize
from atsc.passes.optimise import optimise

TABLE = np.arange(96, dtype=np.float32).reshape(6, 16)


def decoder() -> MiniDecoder:
    made = MiniDecoder(TABLE)
    made.constant("w", np.ones((16, 5), np.float32))
    made.node("MatMul", ["x", "w"], ["logits"])
    return made


def edit_config(folder: Path, **model: object) -> None:
    (folder / "genai_config.json").write_text(json.dumps({"model": model}))


def test_a_folder_or_its_file(tmp_path: Path) -> None:
    path = decoder().save(tmp_path, external=True)
    assert import_onnx(path).nodes == import_onnx(tmp_path).nodes


def test_a_folder_with_spaces_and_other_letters(tmp_path: Path) -> None:
    folder = tmp_path / "mein Modell ü 模型"
    folder.mkdir()
    decoder().save(folder, external=True)
    graph = import_onnx(folder)
    np.testing.assert_array_equal(dequantize(graph.weights["table"]), TABLE)
    assert graph.info.name == "mein Modell ü 模型"


def test_a_folder_without_configuration(tmp_path: Path) -> None:
    decoder().save(tmp_path)
    (tmp_path / "genai_config.json").unlink()
    with pytest.raises(ModelError, match="cannot tell the context length"):
        import_onnx(tmp_path)
    config = {"max_position_embeddings": 77, "eos_token_id": [4, 5], "bos_token_id": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    info = import_onnx(tmp_path).info
    assert (info.context_length, info.eos_token_ids, info.bos_token_id) == (77, (4, 5), 1)
    (tmp_path / "second.onnx").touch()
    with pytest.raises(ModelError, match=r"2 \.onnx files: give the path of the \.onnx file"):
        import_onnx(tmp_path)


def test_companions_travel_with_the_model(tmp_path: Path) -> None:
    decoder().save(tmp_path)
    names = ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"]
    for name in names:
        (tmp_path / name).write_text("{}")
    (tmp_path / "notes.txt").touch()
    found = [Path(file).name for file in import_onnx(tmp_path).info.companion_files]
    assert sorted(found) == sorted([*names, "genai_config.json"])


def test_links_as_model_caches_have_them(tmp_path: Path) -> None:
    """Both files are links to blobs in another folder; the names beside the link count."""
    snapshot, blobs, written = (tmp_path / name for name in ("snapshot", "blobs", "written"))
    for folder in (snapshot, blobs, written):
        folder.mkdir()
    decoder().save(written, external=True)
    for index, file in enumerate(sorted(written.iterdir())):
        file.rename(blobs / f"blob{index}")
        (snapshot / file.name).symlink_to(os.path.relpath(blobs / f"blob{index}", snapshot))
    graph = import_onnx(snapshot)
    np.testing.assert_array_equal(dequantize(graph.weights["table"]), TABLE)


def test_a_link_to_the_model_file_alone(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    decoder().save(folder, external=True)
    link = tmp_path / "shortcut.onnx"
    link.symlink_to(folder / "model.onnx")
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 9}')
    graph = import_onnx(link)
    np.testing.assert_array_equal(dequantize(graph.weights["table"]), TABLE)
    assert graph.info.name == "shortcut"


@pytest.mark.parametrize("location", ["weights/deep/model.data", "weights\\deep\\model.data"])
def test_external_data_below_the_folder(tmp_path: Path, location: str) -> None:
    path = decoder().save(tmp_path, external=True)
    (tmp_path / "weights" / "deep").mkdir(parents=True)
    (tmp_path / "model.onnx.data").rename(tmp_path / "weights" / "deep" / "model.data")
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        next(e for e in tensor.external_data if e.key == "location").value = location
    path.write_bytes(model.SerializeToString())
    np.testing.assert_array_equal(dequantize(import_onnx(path).weights["table"]), TABLE)


@pytest.mark.parametrize("location", ["../other.data", "a/../../other.data", "/etc/hostname"])
def test_external_data_outside_the_folder(tmp_path: Path, location: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (tmp_path / "other.data").write_bytes(b"x" * 4096)
    path = decoder().save(folder, external=True)
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        next(e for e in tensor.external_data if e.key == "location").value = location
    path.write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match="external data outside the model's folder"):
        import_onnx(path)


def test_data_that_is_missing_or_short(tmp_path: Path) -> None:
    path = decoder().save(tmp_path, external=True)
    data = tmp_path / "model.onnx.data"
    data.write_bytes(data.read_bytes()[:-4])
    with pytest.raises(ModelError, match=r"model\.onnx\.data: tensor \w+ needs \d+ bytes at"):
        import_onnx(path)
    data.write_bytes(b"")
    with pytest.raises(ModelError, match="the file has 0 bytes: the download is incomplete"):
        import_onnx(path)
    data.unlink()
    with pytest.raises(ModelError, match=r"keep the \.onnx file and its data files together"):
        import_onnx(path)


@pytest.mark.parametrize("content", [b"", b"hello, this is no model", b"\x08\x0a\x00\x00\xff"])
def test_no_model(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"model\.onnx: not an ONNX model"):
        import_onnx(path)


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such file or folder"):
        import_onnx(tmp_path / "absent.onnx")
    edit_config(tmp_path, decoder={"filename": "other.onnx"})
    with pytest.raises(ModelError, match=r"names other\.onnx, which is not in the folder"):
        import_onnx(tmp_path)
    (tmp_path / "genai_config.json").write_text("[1")
    with pytest.raises(ModelError, match="not readable as JSON"):
        import_onnx(tmp_path)


def test_other_names_of_inputs(tmp_path: Path) -> None:
    made = decoder()
    made.inputs[0].name = "tokens"
    made.nodes[0].input[1] = "tokens"
    path = made.save(tmp_path)
    edit_config(tmp_path, context_length=9, decoder={"inputs": {"input_ids": "tokens"}})
    assert [value.name for value in import_onnx(path).inputs] == ["input_ids"]


def test_weights_stay_on_disk(tmp_path: Path) -> None:
    """3 GiB of weights, a hole in the file: import and passes read none of it."""
    rows, width = 7 << 12, 7 << 12
    made = decoder()
    made.initializers.clear()
    for index, name in enumerate(("table", "w")):
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT16)
        tensor.dims.extend((rows, width))
        tensor.data_location = TensorProto.EXTERNAL
        length = rows * width * 2
        entries = {"location": "big.data", "offset": index * length, "length": length}
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=str(value))
        made.initializers.append(tensor)
    path = made.save(tmp_path)
    with open(tmp_path / "big.data", "wb") as file:
        file.truncate(2 * rows * width * 2)
    tracemalloc.start()
    graph = optimise(import_onnx(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 << 20
    assert graph.weights["w"].parts["data"].read()[5, :3].tolist() == [0, 0, 0]


def test_inline_weights_stay_on_disk_too(tmp_path: Path) -> None:
    table = np.random.default_rng(0).standard_normal((4096, 512), np.float32)
    made = MiniDecoder(table)
    made.constant("small", np.full(512, 2, np.float32))
    made.node("Mul", ["x", "small"], ["doubled"])
    made.node("MatMul", ["doubled", made.constant("w", table.T[:, :9])], ["logits"])
    path = made.save(tmp_path)
    import_onnx(path)
    tracemalloc.start()
    graph = import_onnx(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20 < table.nbytes
    assert graph.info.source_files == (str(path),)
    np.testing.assert_array_equal(dequantize(graph.weights["table"]), table)
    made.assert_agrees([np.array([5, 4095])], tolerance=1e-5)


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    path = decoder().save(tmp_path)
    content = path.read_bytes()
    for length in (len(content) - 1, len(content) // 2, 30):
        path.write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"model\.onnx: not an ONNX model"):
            import_onnx(path)


def test_values_of_constants_in_every_spelling(tmp_path: Path) -> None:
    made = MiniDecoder(TABLE)
    made.node("Constant", [], ["two"], name="two", value_float=2.0)
    made.node("Constant", [], ["row"], name="row", value_floats=[float(i) for i in range(16)])
    tensor = helper.make_tensor("t", TensorProto.FLOAT, [1], [0.5])
    made.node("Constant", [], ["half"], name="half", value=tensor)
    made.node("Mul", ["x", "two"], ["a"])
    made.node("Add", ["a", "row"], ["b"])
    made.node("Mul", ["b", "half"], ["logits"], name="second")
    made.assert_agrees()
