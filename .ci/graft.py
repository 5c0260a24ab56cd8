# SPDX-License-Identifier: Apache-2.0
"""`graft.py WHEEL PLACE`: an environment with a vLLM that has no build for the CPU.

WHEEL is vLLM's own, built for CUDA. Its Python sources are put over the kernels of the vLLM for the
CPU in this interpreter's environment, and everything else comes from there. Model runner V2 wants
Triton, which has no compiler for CPUs: the kernels run in Triton's own interpreter, for which
TRITON_INTERPRET=1 must be set. So scheduler, engine core, model runner and hooks are those of that
version; kernels written in C++ are those of the older one.
"""

import re
import shutil
import site
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import PackageNotFoundError, PathDistribution, distribution
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement

# Requirements that only a GPU has a use for, by their names.
GPU = re.compile(r"torch|nv|cutlass|flashinfer|tilelang|quack|humming|tvm|tensor|tokenspeed")
# What vLLM looks for is a backend of Triton with this name. Its parts are never called:
# the interpreter needs neither.
BACKEND = {
    "__init__": """\
def take_any_mask():
    # Triton's compilers take a mask of integers, its interpreter up to 3.9 only one of booleans.
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain = InterpreterBuilder.create_masked_store

    def create_masked_store(self, ptrs, value, mask, *rest):
        return plain(self, ptrs, value, TensorHandle(mask.data.astype(bool), mask.dtype), *rest)

    InterpreterBuilder.create_masked_store = create_masked_store
""",
    "driver": """\
from triton.backends.driver import DriverBase


class InterpreterDriver(DriverBase):
    @classmethod
    def is_active(cls):
        return True


InterpreterDriver.__abstractmethods__ = frozenset()
""",
    "compiler": """\
from triton.backends.compiler import BaseBackend


class InterpreterBackend(BaseBackend):
    pass


InterpreterBackend.__abstractmethods__ = frozenset()
""",
}
ENTRIES = """
[triton.backends]
cpu = triton_interpreter

[vllm.general_plugins]
triton_interpreter = triton_interpreter:take_any_mask
"""


def main(wheel: Path, place: Path) -> None:
    """Makes the environment anew."""
    shutil.rmtree(place, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(place)], check=True)
    packages = place / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
    # After this environment's own packages come all of the one that makes it.
    base = site.getsitepackages()[0]
    (packages / "base.pth").write_text(f"import site; site.addsitedir({base!r})\n")
    with zipfile.ZipFile(wheel) as archive:
        names = [one for one in archive.namelist() if not one.endswith(".so")]
        archive.extractall(packages, names)
    spec = find_spec("vllm")
    assert spec is not None and spec.submodule_search_locations is not None
    for kernels in Path(spec.submodule_search_locations[0]).glob("*.so"):
        shutil.copy(kernels, packages / "vllm")
    # vLLM takes itself for a build for the CPU by its version.
    (info,) = packages.glob("vllm-*.dist-info")
    replace(info / "METADATA", r"^Version: \S+$", r"\g<0>+cpu")
    install_missing(PathDistribution(info).requires or [], place)
    replace(info / "entry_points.txt", r"\Z", ENTRIES)
    backend = packages / "triton_interpreter"
    backend.mkdir()
    for name, text in BACKEND.items():
        (backend / f"{name}.py").write_text(text)


def install_missing(requires: list[str], place: Path) -> None:
    """Installs what this vLLM asks for and the older one did not, less what only a GPU needs."""
    wanted = [Requirement(one) for one in requires]
    missing = []
    for one in wanted:
        if one.marker is not None and not one.marker.evaluate({"extra": ""}):
            continue
        try:
            distribution(one.name)
        except PackageNotFoundError:
            if not GPU.search(one.name.lower()):
                missing.append(f"{one.name}{one.specifier}")
    if missing:
        pip = [sys.executable, "-m", "pip", "--python", str(place / "bin" / "python")]
        command = [*pip, "install", "--quiet", "--no-deps", "--only-binary", ":all:", *missing]
        subprocess.run(command, check=True)


def replace(path: Path, pattern: str, by: str) -> None:
    """Replaces the one place where a file's text is like the pattern."""
    text, count = re.subn(pattern, by, path.read_text(), count=1, flags=re.MULTILINE)
    assert count == 1, f"{path} has no {pattern}"
    path.write_text(text)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
