"""ONNX files as Graphs; the only package that knows onnx."""
