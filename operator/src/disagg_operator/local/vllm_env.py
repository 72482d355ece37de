"""The environment of a vLLM engine on this machine."""

from __future__ import annotations

ENGINE_ENV = {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # Engines here share the cores. A worker bound to one binds all its threads: they starve behind
    # another engine's worker that spins on the same core, and single steps take half a minute.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""An engine that keeps to this machine, with a cache of 1 GiB."""
