# SPDX-License-Identifier: Apache-2.0
"""`read_to_gpu.py RING COUNT`: takes samples to the device, prints the digest of each."""

import hashlib
import sys

import torch

import shmconn


def main() -> None:
    """Reads."""
    name, count = sys.argv[1], int(sys.argv[2])
    with shmconn.subscribe(name, "child", wait_s=60, pin=True) as subscription:
        for _ in range(count):
            sample = subscription.next(60)
            assert sample is not None
            states, _ = sample.to("cuda", non_blocking=True)
            sample.release()
            del sample
            data = states.view(torch.int16).cpu().numpy().tobytes()
            print(hashlib.sha256(data).hexdigest())


if __name__ == "__main__":
    main()
