"""What libraries are told before the first of them is imported."""

from __future__ import annotations

import logging
import os


def quiet_libraries() -> None:
    """Keep libraries from talking over the command, and from reporting to anybody."""
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HIVEMIND_LOGLEVEL", "WARNING")
    # On some CPUs it asks for the package `kernels`, which only generating text with 4-bit weights would use.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # One peer per GPU: torch would put the Trainer into DataParallel over all of them.
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
