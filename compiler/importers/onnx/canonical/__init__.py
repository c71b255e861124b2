"""Rewrites of decomposed ONNX graphs to the contrib-style operators that the importer takes."""
