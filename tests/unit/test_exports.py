# SPDX-License-Identifier: Apache-2.0
"""What `import shmconn` gives, and what it does not drag in."""

import subprocess
import sys

import shmconn


def test_every_exported_name_is_there_and_sorted() -> None:
    assert shmconn.__all__ == sorted(shmconn.__all__)
    for name in shmconn.__all__:
        assert getattr(shmconn, name) is not None


def test_every_error_is_exported() -> None:
    from shmconn import errors

    public = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert public <= set(shmconn.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    try:
        shmconn.nothing  # noqa: B018
    except AttributeError as error:
        assert "nothing" in str(error)
    else:
        raise AssertionError("no AttributeError")


def test_importing_shmconn_is_light() -> None:
    code = (
        "import sys, shmconn; shmconn.subscribe; shmconn.rings\n"
        "heavy = {'torch', 'vllm', 'safetensors', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
