# SPDX-License-Identifier: Apache-2.0
"""Makes the connector known to vLLM by name: the entry point ``vllm.general_plugins``."""

import contextlib
import logging

NAME = "ShmHiddenStatesConnector"


def register() -> None:
    """Registers the connector.

    vLLM calls this in each of its processes, maybe more than once, and also when the connector
    is not asked for: so it imports nothing of ours, and never raises.
    """
    try:
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    except ImportError:
        logging.getLogger("vllm.shmconn").warning(
            "shmconn: this vLLM has no KV connectors of version 1, so %s is not available", NAME
        )
        return
    # ValueError is how vLLM says that the name is registered already.
    with contextlib.suppress(ValueError):
        KVConnectorFactory.register_connector(NAME, "shmconn.connector", NAME)
