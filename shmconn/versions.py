# SPDX-License-Identifier: Apache-2.0
"""Which vLLM this is: what it cannot do, found at start, and whether it was ever run."""

import logging
from typing import Any

from shmconn.errors import OptionError

logger = logging.getLogger("vllm.shmconn")

# By kind of device; how each was run stands in docs/vllm.md.
RUN = {
    "cpu": ("0.22.1", "0.26.0", "0.28.0", "0.32.0", "0.34.0"),
    "cuda": ("0.26.0",),
}


def check_vllm(vllm_config: Any, *, tell: bool) -> None:
    """Refuses an engine that would keep blocks for ever.

    Args:
        vllm_config: of the engine.
        tell: say it in the log if this version was not run.

    Raises:
        OptionError: this vLLM takes no step for requests whose blocks are held.
    """
    import vllm
    from vllm.v1.core.sched.scheduler import Scheduler

    version = str(getattr(vllm, "__version__", "of unknown version"))
    if "connector" not in Scheduler.has_finished_requests.__code__.co_names:
        raise OptionError(
            f"vLLM {version} takes no step while a request's blocks are held, so they would never "
            "be given back: use 0.22 or later"
        )
    device = str(getattr(getattr(vllm_config, "device_config", None), "device_type", "cpu"))
    run = RUN.get(device, ())
    if tell and version.partition("+")[0] not in run:
        logger.warning(
            "shmconn was never run with vLLM %s on %s (%s): all that it relies on is there, but "
            "compare some samples with `shmconn verify` before you rely on it; docs/vllm.md says "
            "what was run",
            version,
            device,
            f"run were {', '.join(run)}" if run else "with none there",
        )
