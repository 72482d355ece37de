"""A connector that moves nothing: every worker writes what its cache is like, for `disagg probe`.

`--kv-transfer-config '{"kv_connector": "DisaggProbe", "kv_connector_module_path": "disagg_agent.engines.vllm.probe",
"kv_role": "kv_both", "kv_connector_extra_config": {"output": "FOLDER"}}'`. As `DisaggConnector` it supports hybrid
caches, so that the engine lays its cache out just as it will for that one.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import vllm
from vllm.config import get_layers_from_vllm_config
from vllm.distributed import get_pp_group, get_tensor_model_parallel_rank
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.v1 import kv_cache_interface

from disagg_agent.engines.vllm.axes import AxesUnknownError, ShapeOf, Sizes, name_axes, plain_fields
from disagg_agent.engines.vllm.layout import layer_id
from disagg_agent.errors import RegistrationRefused
from disagg_plan.probe_facts import SCHEMA, LayerFacts, RankFacts, TensorFacts, encode_facts, rank_file

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

_REFUSING = (AxesUnknownError, AssertionError, AttributeError, RuntimeError, TypeError, ValueError)
"""How a backend answers a question about sizes that it does not have."""


class DisaggProbe(KVConnectorBase_V1, SupportsHMA):
    """Writes `rank-N.json` into the folder `output` when the cache is there."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._output = Path(vllm_config.kv_transfer_config.kv_connector_extra_config["output"])

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Write this worker's facts; complete or not at all, so that a reader may come at any moment."""
        facts = rank_facts(self._vllm_config, self._kv_cache_config, kv_caches)
        self._output.mkdir(parents=True, exist_ok=True)
        path = self._output / rank_file(facts.rank)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}")
        unfinished.write_text(encode_facts(facts))
        unfinished.replace(path)
        log.info("wrote %s", path)

    # Nothing is moved.

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_save(self) -> None:
        """Nothing."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """No tokens are elsewhere."""
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """Nothing."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """Nothing to tell workers."""
        return KVConnectorMetadata()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """No page stays."""
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """No page stays."""
        return False, None


def rank_facts(config: VllmConfig, cache: KVCacheConfig, kv_caches: dict[str, torch.Tensor]) -> RankFacts:
    """What this worker's cache is like."""
    parallel, model = config.parallel_config, config.model_config
    backends = {
        name: layer.get_attn_backend()
        for name, layer in get_layers_from_vllm_config(config, AttentionLayerBase).items()
        if name in kv_caches
    }
    served = model.served_model_name
    stated = config.cache_config.cache_dtype
    return RankFacts(
        schema_=SCHEMA,
        rank=parallel.rank,
        tensor=parallel.tensor_parallel_size,
        tensor_rank=get_tensor_model_parallel_rank(),
        pipeline=parallel.pipeline_parallel_size,
        pipeline_rank=get_pp_group().rank_in_group,
        context=parallel.decode_context_parallel_size * getattr(parallel, "prefill_context_parallel_size", 1),
        engine="vllm",
        version=vllm.__version__.split("+")[0],
        backend="+".join(sorted({backend.get_name() for backend in backends.values()})),
        model=served[0] if isinstance(served, list) else served or model.model,
        revision=model.revision,
        dtype=_dtype(model.dtype) if stated == "auto" else stated,
        block_tokens=config.cache_config.block_size,
        blocks=cache.num_blocks,
        total_heads=model.get_total_num_kv_heads(),
        layout=str(getattr(config.cache_config, "kv_cache_layout", None) or ""),
        config=plain_fields(model.hf_config.to_dict()),
        layers=_layers(cache, kv_caches, backends),
    )


def _layers(cache: KVCacheConfig, kv_caches: dict[str, torch.Tensor], backends: dict[str, Any]) -> list[LayerFacts]:
    groups = {
        name: (number, getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec))
        for number, group in enumerate(cache.kv_cache_groups)
        for name in group.layer_names
    }
    storages: list[int] = []
    layers = []
    for name, cached in kv_caches.items():
        # An entry without a group shares the cache of another layer; the numbers of its spec are not its own.
        number, spec = groups.get(name, (None, None))
        backend = backends.get(name)
        axes, problem = _axes(backend, spec)
        tensors = cached if isinstance(cached, list | tuple) else [cached]
        layers.append(
            LayerFacts(
                name=name,
                layer=_layer(name),
                group=number,
                spec=type(spec).__name__,
                role=str(getattr(getattr(spec, "cache_role", None), "value", "")),
                block_tokens=getattr(spec, "block_size", 1),
                backend=backend.get_name() if backend else "",
                heads=getattr(spec, "num_kv_heads", 0),
                head_size=getattr(spec, "head_size", 0),
                head_size_v=getattr(spec, "head_size_v", getattr(spec, "head_size", 0)),
                axes=axes,
                axes_problem=problem,
                tensors=[_tensor(tensor, storages) for tensor in tensors],
            )
        )
    return layers


def _tensor(tensor: torch.Tensor, storages: list[int]) -> TensorFacts:
    address = tensor.untyped_storage().data_ptr()
    if address not in storages:
        storages.append(address)
    return TensorFacts(
        shape=list(tensor.shape),
        strides=list(tensor.stride()),
        element=tensor.element_size(),
        dtype=_dtype(tensor.dtype),
        storage=storages.index(address),
        offset=tensor.data_ptr() - address,
    )


def _layer(name: str) -> int | None:
    try:
        return layer_id(name)
    except RegistrationRefused:
        return None


def _axes(backend: Any, spec: Any) -> tuple[list[str], str]:
    """Axes of an entry, or none and why they are not known."""
    if backend is None or not hasattr(spec, "num_kv_heads"):
        return [], f"{type(spec).__name__} has no KV heads, or no attention backend serves it"
    try:
        return name_axes(_shape_rule(backend, spec)), ""
    except _REFUSING as error:
        return [], f"{backend.get_name()} was asked for shapes and said {type(error).__name__}: {error}"[:1000]


def _shape_rule(backend: Any, spec: Any) -> ShapeOf:
    """vLLM's rule for the shape of one layer: its own from the spec (0.30 and later), or the backend's before."""
    shape_bytes = getattr(kv_cache_interface, "compute_layer_kv_cache_shape_bytes", None)
    if shape_bytes is None:
        return lambda sizes: backend.get_kv_cache_shape(sizes.blocks, sizes.tokens, sizes.heads, sizes.head_size)
    unpacked = {"num_head_slots": None, "state_content_bytes": None, "page_size_padded": None}
    if backend.customize_spec(replace(spec, **unpacked)).num_head_slots != spec.num_head_slots:
        raise AxesUnknownError("the layer packs its heads in a way that its backend does not tell")

    def shape(sizes: Sizes) -> Sequence[int]:
        asked = {"block_size": sizes.tokens, "num_kv_heads": sizes.heads, "head_size": sizes.head_size}
        if spec.head_size_v:
            asked["head_size_v"] = sizes.head_size
        # Only the backend knows how it packs, and it says so only of a spec that is not packed yet.
        return list(shape_bytes(backend.customize_spec(replace(spec, **unpacked, **asked)), sizes.blocks))

    return shape


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
