#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Run the tests of speculators' backend in an environment of their own, .venv-speculators: speculators
# asks for another torch than vLLM for the CPU brings. The vLLM server of these tests runs in .venv.
#
#     .ci/speculators.sh [PYTEST ARGUMENTS]
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv-speculators
log=.cache/speculators.log
torch_index=https://download.pytorch.org/whl/cpu
whole=$(sha256sum <.ci/speculators.sh)

pip_install() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off "$@" >>"$log" 2>&1
}

failed() {
    tail -n 20 "$log" >&2
    echo "speculators: pip failed; the end of $log is above" >&2
    exit 1
}

if [[ ! -f $venv/shmconn.stamp || $(<"$venv/shmconn.stamp") != "$whole" ]]; then
    echo "speculators: making $venv, some minutes the first time"
    mkdir -p .cache
    rm -rf "$venv"
    : >"$log"
    # The same Python as vLLM's.
    .venv/bin/python -m venv "$venv" || failed
    pip_install torch==2.13.0+cpu || pip_install torch==2.13.0+cpu --extra-index-url "$torch_index" || failed
    # What it asks for beyond this needs an accelerator.
    pip_install --no-deps 'speculators==0.9.*' 'hs-connectors==0.9.*' || failed
    pip_install 'datasets<6' 'transformers>=5,<6' aiohttp click httpx loguru openai protobuf psutil \
        pydantic pydantic-settings tqdm || failed
    pip_install numpy posix_ipc pytest rich safetensors typer || failed
    echo "$whole" >"$venv/shmconn.stamp"
fi
export PYTHONPATH=$PWD
exec "$venv/bin/python" -m pytest tests/integrations/test_speculators.py \
    tests/integrations/test_speculators_vllm.py tests/integrations/test_speculators_bench.py "$@"
