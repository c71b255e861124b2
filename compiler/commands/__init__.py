"""The commands of `atsc`, one module each: `add(parsers)` declares its flags, `run` does the work.

Modules import what they need inside `run`, so that `atsc check` does not wait for onnx.
"""
