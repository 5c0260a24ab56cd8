# SPDX-License-Identifier: Apache-2.0
"""Benchmarks: ratios against a limit or a peer, measured in the same run."""
