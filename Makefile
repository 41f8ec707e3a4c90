# Everything runs in a virtual environment in this folder, which the first call builds and later calls reuse.
#   make demo    train, evaluate and sample small models on text that every Python installation brings
#   make demo-analysis   the papers' analyses of the demo's models, with figures
#   make demo-haed   HAED on characters, with and without its first phase
#   make test    run the tests but the papers' and those that take over ten seconds
#   make test-all    run all tests
#   make test-portable   run the numeric tests once more with the kernels of old processors
#   make gpu     test and measure on a GPU, the most valuable first: OUT=folder MINUTES=9
#   make gpu-pack    put what `make gpu` needs on a machine without a network into the folder gpu-pack
#   make curves  record the loss curves that tests/curves compares with anew
#   make sizes   count the presets anew for fairseq-ms config --list
#   make lint    check style and types
#   make package build sdist and wheel in dist/
#   make docs    build the documentation's site in site/
#   make env     only build the environment
#   make clean   remove the environment and everything built
# PYTHON=/path/to/python3.11 chooses the Python, VENV=folder the environment, JOBS=n the processes of the tests.

# Where there is a gpu-pack, `make gpu` has an environment of its own, made without a network.
PACK := gpu-pack
PACKED := $(and $(filter gpu,$(MAKECMDGOALS)),$(wildcard $(PACK)/*.whl))
VENV ?= $(if $(PACKED),$(PACK)-env,.venv)
PYTHON ?=
JOBS ?= 2
RUN := $(VENV)/bin/python
# What is installed is installed two at a time: downloading waits, compiling does not.
MAKEFLAGS += --jobs=2

# Commands such as fairseq-train come from the environment, and nothing of the caller's Python leaks in, nor where
# the caller's pip installs; PIP_USER also stands above pip's own files.
export PATH := $(abspath $(VENV))/bin:$(PATH)
export PIP_USER := 0
unexport PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_ROOT

.PHONY: help env demo demo-analysis demo-haed test test-all test-portable gpu gpu-pack curves sizes lint package docs clean

help:
	@sed -n 's/^#   //p' Makefile

# Stamps, each written when its step has succeeded: the pins decide about the environment, pyproject.toml about the
# plugin's own command.
PINS := $(VENV)/.pins-installed
PLUGIN := $(VENV)/.plugin-installed

ifeq ($(PACKED),)
$(PINS): requirements/build.txt requirements/libraries.txt requirements/fairseq.txt
	@requirements/make_env.sh $(VENV) "$(PYTHON)"
	@touch $@
else
# The packages of the machine's Python come after those of the pack.
$(PINS): $(PACKED)
	@rm -rf $(VENV)
	@python=$$(command -v $(or $(PYTHON),python3)) && $$python -m venv --without-pip $(VENV) && $$python -c \
	'import sys; print(*(path for path in sys.path if path.endswith("-packages")), sep="\n")' \
	> $$(echo $(VENV)/lib/python3.*/site-packages)/machine.pth
	@$(RUN) $(wildcard $(PACK)/pip-*.whl)/pip install -qq --no-index --no-deps $(PACKED)
	@$(RUN) -m pip install -qq --no-index --no-deps --target $(PEER) $(wildcard $(PACK)/transfo-xl/*.whl)
	@touch $@
endif

$(PLUGIN): $(PINS) pyproject.toml fairseq_ms/version.py
	@$(RUN) -m pip install -qq --disable-pip-version-check --no-input --no-deps --no-build-isolation -e .
	@requirements/link_plugin.sh $(RUN) "$(CURDIR)/fairseq_ms"
	@touch $@

# What tests and style need besides; the oldest NumPy that is supported lies beside the newer one, and the tests put it
# in front.
TESTS := $(VENV)/.tests-installed

$(TESTS): $(PINS) requirements/tests.txt requirements/numpy-oldest.txt
	@echo "fairseq_ms: installing what the tests need, once"
	@$(RUN) -m pip install -qq --disable-pip-version-check --no-input --no-deps -r requirements/tests.txt
	@rm -rf $(VENV)/numpy-oldest
	@$(RUN) -m pip install -qq --disable-pip-version-check --no-input --no-deps --target $(VENV)/numpy-oldest \
	-r requirements/numpy-oldest.txt
	@touch $@

# kenlm, which only some tests and one analysis use, takes a minute to compile.
NGRAM := $(VENV)/.ngram-installed

$(NGRAM): $(PINS) requirements/ngram.txt
	@echo "fairseq_ms: compiling kenlm for the tests, once; this takes about a minute"
	@$(RUN) -m pip install -qq --disable-pip-version-check --no-input --no-deps -r requirements/ngram.txt
	@touch $@

# Hugging Face's TransfoXL, with which one test and one benchmark compare, wants older packages than the others.
PEER := $(VENV)/transfo-xl

$(PEER)/.installed: $(PINS) requirements/transfo-xl.txt
	@rm -rf $(PEER)
	@$(RUN) -m pip install -qq --disable-pip-version-check --no-input --no-deps --target $(PEER) -r requirements/transfo-xl.txt
	@touch $@

# Exported models are tested with two versions of transformers, checkpoints with lm-evaluation-harness.
HUB := $(VENV)/transformers-4/.installed $(VENV)/transformers-5/.installed $(VENV)/lm-eval/.installed

$(HUB): $(VENV)/%/.installed: $(PINS) requirements/%.txt
	@rm -rf $(VENV)/$*
	@$(RUN) -m pip install -qq --disable-pip-version-check --no-input --no-deps --target $(VENV)/$* -r requirements/$*.txt
	@touch $@

env: $(PLUGIN)
	@:

demo: env
	@$(RUN) user_dir_examples/demo/run.py

demo-analysis: env
	@$(RUN) user_dir_examples/demo/analysis.py

demo-haed: env
	@$(RUN) user_dir_examples/haed/demo.py

test test-all: env $(TESTS) $(NGRAM) $(PEER)/.installed $(HUB)
	@$(RUN) -m pytest -n $(JOBS) --dist worksteal $(if $(filter test,$@),-m "not slow" --ignore tests/papers)

# Kernels for any x86 processor add sums up in another order than a new processor's: what a test knows of the one that
# it was written on shows here. What traces, compiles and wraps models has no numbers of its own.
test-portable: env $(TESTS)
	@MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=default $(RUN) -m pytest -n $(JOBS) --dist worksteal \
	-m "not slow" tests/core tests/references tests/curves tests/models/test_invariants.py \
	$(foreach file,graphs compiled wrapped,--ignore tests/core/test_$(file).py)

# Parts by their value, each with a budget of its own, into a folder that is of one machine (benchmarks/gpu.py). GPT-2 and
# TransfoXL come from different versions of one package.
DEVICE ?= cuda
MINUTES ?= 60
SIZE ?= whole
OUT ?= gpu-results
gpu: $(if $(PACKED),$(PLUGIN),env $(TESTS) $(PEER)/.installed $(VENV)/transformers-5/.installed)
	@$(RUN) -m benchmarks.gpu --device $(DEVICE) --minutes $(MINUTES) --size $(SIZE) --out $(OUT) \
	--transfo-xl $(abspath $(PEER)) $(if $(PACKED),,--transformers $(abspath $(VENV)/transformers-5))

# Wheels for the machine's Python, at most 64 MB: what it lacks of the libraries, fairseq as Python, and TransfoXL.
GPU_PYTHON ?= 3.12
LACKING := antlr4-python3-runtime bitarray hydra-core omegaconf pip portalocker sacremoses setuptools subword-nmt \
	tensorboardX wheel
WHEELS := $(RUN) -m pip --disable-pip-version-check --no-input download -qq --no-deps --only-binary :all: \
	--python-version $(GPU_PYTHON) --platform manylinux_2_28_x86_64 --platform manylinux2014_x86_64
gpu-pack: $(PINS)
	@rm -rf $(PACK)
	@mkdir -p $(PACK)/transfo-xl
	@cat requirements/build.txt requirements/libraries.txt | grep -E '^($(subst $(empty) ,|,$(strip $(LACKING))))==' > $(PACK)/pins.txt
	@grep antlr4 $(PACK)/pins.txt | cat requirements/fairseq.txt - > $(PACK)/sources.txt
	@sed -i /antlr4/d $(PACK)/pins.txt
	@$(WHEELS) -d $(PACK) -r $(PACK)/pins.txt
	@$(WHEELS) -d $(PACK)/transfo-xl -r requirements/transfo-xl.txt
	@READTHEDOCS=1 $(RUN) -m pip wheel -qq --no-deps --no-build-isolation --no-cache-dir --no-binary :all: -w $(PACK) \
	-r $(PACK)/sources.txt
	@[ $$(du -sm $(PACK) | cut -f1) -le 64 ] || { du -sh $(PACK)/*; echo "$(PACK) is larger than 64 MB" >&2; exit 1; }
	@du -sh $(PACK)

curves: env $(TESTS)
	@$(RUN) -m tests.curves.record

sizes: env $(TESTS)
	@$(RUN) -m tests.presets.record

lint: env $(TESTS)
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check --quiet .
	@$(RUN) -m mypy

package: env $(TESTS)
	@rm -rf dist
	@$(RUN) -m build --no-isolation --outdir dist . > /dev/null
	@ls dist

# The site's libraries live beside the environment's, which are of other versions.
SITE := $(VENV)/docs

$(SITE)/.installed: $(PINS) requirements/docs.txt
	@rm -rf $(SITE)
	@$(RUN) -m pip install -qq --disable-pip-version-check --no-input --no-deps --target $(SITE) -r requirements/docs.txt
	@touch $@

docs: env $(SITE)/.installed
	@NO_MKDOCS_2_WARNING=1 PYTHONPATH=$(SITE) $(RUN) -m mkdocs build --strict

clean:
	@if [ -e $(VENV)/made-by-fairseq-ms ]; then rm -rf $(VENV); fi
	rm -rf gpu-pack gpu-pack-env build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache
