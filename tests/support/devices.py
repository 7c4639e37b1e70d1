"""The device that models in tests are on: the host's memory; with SMB_TEST_DEVICE=cuda a GPU, where there is one."""

from __future__ import annotations

import os

DEVICE = os.environ.get("SMB_TEST_DEVICE", "cpu")
ON_HOST = DEVICE == "cpu"
BACKEND = "gloo" if ON_HOST else "nccl"  # of ranks that have a device each
