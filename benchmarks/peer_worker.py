"""One engine in a process of its own: loads a model, then times what standard input asks for.

    peer_worker.py ENGINE MODEL --threads N --prompt N --decode N

Prints one JSON line when the model is ready, and one for each line of input: `pp` (a prompt of N
tokens into an empty context) or `tg` (N tokens after the first): {"seconds": ...}. Needs the engine
and numpy alone, so that it runs in whatever environment has the engine.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np


class Engine(Protocol):
    """What every engine can do; `prefill` and `decode` compute the logits of the last token."""

    version: str
    vocab_size: int

    def reset(self) -> None:
        """Empty the context."""

    def prefill(self, ids: list[int]) -> None:
        """Append a prompt."""

    def decode(self, token: int) -> None:
        """Append one token."""


class Atsc:
    """A plan, through atsc's Python interface."""

    def __init__(self, model: Path, args: argparse.Namespace) -> None:
        import atsc

        self._plan: Any = atsc.load(model, threads=args.threads)
        self._session = self._plan.session()
        self.version = atsc.__version__
        self.vocab_size = len(self._session.prefill([0]))

    def reset(self) -> None:
        self._session.rewind(0)

    def prefill(self, ids: list[int]) -> None:
        self._session.prefill(ids)

    def decode(self, token: int) -> None:
        self._session.decode(token, copy=False)


class LlamaCpp:
    """llama.cpp through llama-cpp-python's low-level interface."""

    def __init__(self, model: Path, args: argparse.Namespace) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        self.version = llama_cpp.__version__
        self._silence = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._silence, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        handle = llama_cpp.llama_model_load_from_file(
            str(model).encode(), llama_cpp.llama_model_default_params()
        )
        if not handle:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = max(args.prompt, args.decode + 1) + 8
        options.n_batch = options.n_ubatch = max(args.prompt, 32)
        options.n_threads = options.n_threads_batch = args.threads
        self._context = llama_cpp.llama_init_from_model(handle, options)
        vocabulary = llama_cpp.llama_model_get_vocab(handle)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)

    def reset(self) -> None:
        memory = self._lib.llama_get_memory(self._context)
        self._lib.llama_memory_clear(memory, True)

    def prefill(self, ids: list[int]) -> None:
        array = (self._lib.llama_token * len(ids))(*ids)
        batch = self._lib.llama_batch_get_one(array, len(ids))
        if self._lib.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        self._lib.llama_get_logits_ith(self._context, -1)[0]

    def decode(self, token: int) -> None:
        self.prefill([token])


class OnnxRuntimeGenAi:
    """onnxruntime-genai; `model` is the ONNX file, beside its genai_config.json."""

    def __init__(self, model: Path, args: argparse.Namespace) -> None:
        import onnxruntime_genai

        self._lib: Any = onnxruntime_genai
        self.version = onnxruntime_genai.__version__
        config = onnxruntime_genai.Config(str(model.parent))
        sessions = {"intra_op_num_threads": args.threads}
        decoder = {"filename": model.name, "session_options": sessions}
        config.overlay(json.dumps({"model": {"decoder": decoder}}))
        self._model = onnxruntime_genai.Model(config)
        description = json.loads((model.parent / "genai_config.json").read_text())
        self.vocab_size = description["model"]["vocab_size"]
        self._length = max(args.prompt, args.decode + 1) + 8
        self._generator: Any = None

    def reset(self) -> None:
        options = self._lib.GeneratorParams(self._model)
        # The generator stops at the end token; a minimum length keeps it from doing so.
        options.set_search_options(
            max_length=self._length, min_length=self._length, do_sample=False
        )
        self._generator = self._lib.Generator(self._model, options)

    def prefill(self, ids: list[int]) -> None:
        self._generator.append_tokens(np.array(ids, np.int32))
        self._generator.generate_next_token()

    def decode(self, token: int) -> None:
        """It feeds itself the token that it chose last."""
        self._generator.generate_next_token()


ENGINES: dict[str, Callable[[Path, argparse.Namespace], Engine]] = {
    "atsc": Atsc,
    "llama.cpp": LlamaCpp,
    "onnxruntime-genai": OnnxRuntimeGenAi,
}


def main() -> int:
    """Serve until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--prompt", type=int, required=True)
    parser.add_argument("--decode", type=int, required=True)
    args = parser.parse_args()
    try:
        engine = ENGINES[args.engine](args.model, args)
    except Exception as error:  # Whatever an engine raises: it is reported as absent.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        print(json.dumps({"error": lines[0]}), flush=True)
        return 1
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, engine.vocab_size, args.prompt).tolist()
    following = rng.integers(0, engine.vocab_size, args.decode).tolist()
    print(json.dumps({"version": engine.version}), flush=True)
    for line in sys.stdin:
        engine.reset()
        engine.prefill(prompt[:1])  # Wakes the engine's threads.
        if line.strip() == "pp":
            engine.reset()
            begin = time.perf_counter()
            engine.prefill(prompt)
        else:
            begin = time.perf_counter()
            for token in following:
                engine.decode(token)
        print(json.dumps({"seconds": time.perf_counter() - begin}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
