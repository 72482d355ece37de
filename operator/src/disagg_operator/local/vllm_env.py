"""The environment of a vLLM engine on this machine."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

_ENV = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
"""An engine that keeps to this machine, with a cache of 1 GiB."""


def engine_env(arguments: Sequence[str]) -> dict[str, str]:
    """Environment for an engine with these arguments.

    vLLM on CPUs binds its workers to cores: one each as far as there are cores, or none for a single worker.
    """
    workers = _number(arguments, "--tensor-parallel-size", "-tp") * _number(
        arguments, "--pipeline-parallel-size", "-pp"
    )
    cores = os.cpu_count() or 1
    bound = "|".join(str(rank % cores) for rank in range(workers))
    return {**_ENV, "VLLM_CPU_OMP_THREADS_BIND": "nobind" if workers == 1 else bound}


def _number(arguments: Sequence[str], *flags: str) -> int:
    words = [part for word in arguments for part in (word.split("=", 1) if word.startswith("-") else [word])]
    for flag, value in itertools.pairwise(words):
        if flag.replace("_", "-") in flags and value.isdecimal():
            return max(1, int(value))
    return 1
