"""vLLM's side: an external KV connector that only adapts. `--kv-transfer-config` names module and `DisaggConnector`.

Settings come from `kv_connector_extra_config` (`socket`, `placement`) or from the pod's environment (`DISAGG_SOCKET`,
`DISAGG_MOVER_PLACEMENT`), which is what the operator renders. Placement is `auto`, `agent` or `engine`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.request import RequestStatus

from disagg_agent.engine_client import EngineRank
from disagg_agent.engines.vllm.decisions import Identity, Orders, SchedulerHalf
from disagg_agent.engines.vllm.device import access, mark, memory_of
from disagg_agent.engines.vllm.layout import TensorFacts, regions, tables
from disagg_agent.engines.vllm.ordering import Step, StepLog
from disagg_agent.engines.vllm.probe import rank_facts
from disagg_agent.engines.vllm.worker import Registration, WorkerHalf
from disagg_agent.placement import choose_placement, one_place
from disagg_plan.probed_pages import form

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from disagg_plan.probe_facts import RankFacts

log = logging.getLogger(__name__)

_CONNECT_SECONDS = 30.0
_COMPLETE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass
class DisaggMetadata(KVConnectorMetadata):
    """What the scheduler tells every worker in a step."""

    orders: Orders = field(default_factory=Orders)
    step: Step = field(default_factory=Step)


class DisaggConnector(KVConnectorBase_V1, SupportsHMA):
    """Prefill holds, decode loads, over the agent of the pod."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._socket = Path(extra.get("socket") or os.environ["DISAGG_SOCKET"])
        self._placement = extra.get("placement") or os.environ.get("DISAGG_MOVER_PLACEMENT", "auto")
        self._worker: WorkerHalf | None = None
        if role == KVConnectorRole.SCHEDULER:
            blocks = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
            self._steps = StepLog()
            self._scheduler = SchedulerHalf(self._identity(), blocks, lambda: uuid4().hex)

    # Scheduler.

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """See `KVConnectorBase_V1`."""
        return self._scheduler.matched(request.kv_transfer_params, request.num_prompt_tokens, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """See `KVConnectorBase_V1`."""
        self._scheduler.allocated(
            request.request_id,
            request.kv_transfer_params,
            request.num_prompt_tokens,
            num_external_tokens,
            blocks.get_block_ids(),
        )

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        """See `KVConnectorBase_V1`."""
        step = self._steps.next(scheduler_output.num_scheduled_tokens, scheduler_output.finished_req_ids)
        return DisaggMetadata(self._scheduler.orders(idle=scheduler_output.total_num_scheduled_tokens == 0), step)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        """See `KVConnectorBase_V1`."""
        self._scheduler.loaded(connector_output.finished_recving or ())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """See `KVConnectorBase_V1`."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See `SupportsHMA`."""
        return self._scheduler.finished(
            request.request_id,
            request.kv_transfer_params,
            request.status in _COMPLETE,
            request.num_computed_tokens,
            block_ids,
        )

    # Worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Register the cache with the agent; what differs from the plan ends the engine with one sentence."""
        connect = partial(EngineRank, self._socket, _CONNECT_SECONDS)
        connection = connect()
        plan = connection.loaded.plan
        storages, facts = _facts(kv_caches)
        rank = self._vllm_config.parallel_config.rank
        place = one_place((memory_of(storage).place for storage in storages), f"rank {rank}")
        placement = choose_placement(self._placement, place)
        fds: list[int] = []
        if placement == "agent" and place.kind == "DRAM":
            # Moves each storage into shared memory in place: every view of it, vLLM's own included, follows.
            fds = [storage._share_fd_cpu_()[0] for storage in storages]
            storages, facts = _facts(kv_caches)
        registration = Registration(
            rank=rank,
            factors=_factors(
                rank_facts(self._vllm_config, self._kv_cache_config, kv_caches),
                connection.loaded.expected_factors(connection.welcome.role).get("layout"),
            ),
            memory=[memory_of(storage) for storage in storages],
            fds=fds,
            regions=regions(plan, facts),
            placement=placement,
            device=access(place),
            mark=partial(mark, place) if place.kind == "VRAM" else None,
        )
        groups = [group.layer_names for group in self._kv_cache_config.kv_cache_groups]
        self._storages = storages
        self._worker = WorkerHalf(connection, registration, tables(plan, groups), connect)
        log.info("registered rank %d with the agent at %s", registration.rank, self._socket)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """See `KVConnectorBase_V1`; comes before the step's kernels, as nothing later does."""
        super().bind_connector_metadata(connector_metadata)
        if self._worker is not None and isinstance(connector_metadata, DisaggMetadata):
            self._worker.begin(connector_metadata.step)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        """Pass this step's orders on; returns at once."""
        metadata = self._get_connector_metadata()
        if self._worker is not None and isinstance(metadata, DisaggMetadata):
            self._worker.execute(metadata.orders, metadata.step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads end before their request is scheduled."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: pages are read where they are."""

    def wait_for_save(self) -> None:
        """Nothing, as above."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """See `KVConnectorBase_V1`."""
        if self._worker is None:
            return KVConnectorTransferResults()
        metadata = self._connector_metadata
        results = self._worker.results(isinstance(metadata, DisaggMetadata) and metadata.orders.idle)
        return KVConnectorTransferResults(results.sent, results.received, results.failed)

    def shutdown(self) -> None:
        """See `KVConnectorBase_V1`."""
        if self._worker is not None:
            self._worker.close()

    # Both.

    def _identity(self) -> Identity:
        look = EngineRank(self._socket, _CONNECT_SECONDS)
        welcome, plan = look.welcome, look.loaded.plan
        look.close()
        parallelism = look.loaded.side(welcome.role).parallelism
        return Identity(
            welcome.replica,
            welcome.side_host,
            welcome.side_port,
            plan.digest,
            parallelism.tensor,
            parallelism.pipeline,
        )


def _factors(facts: RankFacts, planned_layout: object) -> dict[str, Any]:
    """Compatibility factors as this engine has them, not as anybody declared them.

    Args:
        planned_layout: reported where the strides allow it among others: one head has no order.

    Raises:
        Refusal: pages that no plan can hold.
    """
    allowed = [set(form(layer.name, facts, layer).layouts) for layer in facts.layers]
    layouts: set[Any] = set.intersection(*allowed) if allowed else set()
    factors = {
        "model": facts.model,
        "dtype": facts.dtype,
        "engine": facts.engine,
        "engineVersion": facts.version,
        "blockTokens": facts.block_tokens,
        "profile": f"{facts.engine}/{facts.backend}",
        "layout": planned_layout if planned_layout in layouts else "/".join(sorted(layouts)) or "mixed",
    }
    if facts.revision is not None:
        factors["revision"] = facts.revision
    return factors


def _facts(kv_caches: dict[str, torch.Tensor]) -> tuple[list[torch.UntypedStorage], list[TensorFacts]]:
    """Storages in order of appearance, and each tensor as a view of one of them."""
    storages: dict[int, torch.UntypedStorage] = {}
    facts = []
    for name, tensor in kv_caches.items():
        storage = tensor.untyped_storage()
        storages.setdefault(storage.data_ptr(), storage)
        facts.append(
            TensorFacts(
                name,
                list(storages).index(storage.data_ptr()),
                tensor.data_ptr() - storage.data_ptr(),
                tuple(tensor.shape),
                tuple(tensor.stride()),
                tensor.element_size(),
            )
        )
    return list(storages.values()), facts
