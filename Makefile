# SPDX-License-Identifier: Apache-2.0
# PYTHON chooses the interpreter for .venv; DTYPE=bfloat16 runs the demo as people run vLLM.
SHELL := /bin/bash
BIN := .venv/bin
.PHONY: help demo model test test-long compat vllm-next speculators check bench clean venv
.DEFAULT_GOAL := help

help:  ## Show this list
	@sed -n 's/^\([a-z-]*\):.*##/\1\t/p' Makefile | column -t -s $$'\t'

demo: venv model  ## Real prompts through vLLM and a ring into verified files (under 4 minutes)
	@$(BIN)/python examples/demo/demo.py

# Threads of torch that spin while they wait keep each other from the few cores.
test test-long: export OMP_WAIT_POLICY := PASSIVE
test: venv model  ## All tests of the push tier, real vLLM included
	@$(BIN)/python -m pytest -m "not long"

test-long: venv model  ## The tests that take minutes to hours
	@$(BIN)/python -m pytest -m long

compat: venv model  ## vLLM 0.34, 0.28, 0.26 and 0.22 on the CPU, and the newest's interface
	@.ci/compat.sh

vllm-next: venv model  ## The newest vLLM that there is: the connector's tests, and its interface
	@.ci/compat.sh --newest

speculators: venv model  ## speculators 0.9 itself, in a venv of its own, against a real vLLM
	@.ci/speculators.sh

check: venv  ## Lint, format and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: venv  ## Speed of the ring beside plain copies and files
	@$(BIN)/shmconn bench

clean:  ## Remove what runs and tools left here; keeps .venv* and .cache
	@rm -rf out build dist ./*.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find shmconn reader tests examples -name __pycache__ -prune -exec rm -rf {} +

venv:
	@.ci/venv.sh

model: venv
	@$(BIN)/python examples/demo/make_model.py .cache/smollm2
