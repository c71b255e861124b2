"""ONNX files as Graphs; the only package that knows onnx."""

from atsc.compiler.importers.onnx.importer import import_onnx

__all__ = ["import_onnx"]
