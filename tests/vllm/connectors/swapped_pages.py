"""The negative control: a connector that swaps the first and the last page of a load when a request asks for it.

The last page is a partial one. Two whole pages would not do: keys are cached with their positions, and attention does
not depend on the order in which it sees them.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from disagg_agent.engines.vllm.connector import DisaggConnector


class SwappedPages(DisaggConnector):
    """`DisaggConnector`, but wrong on demand."""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """As the parent, then swap."""
        params = request.kv_transfer_params or {}
        own = params.get("disagg")
        swap = params.get("do_remote_prefill") and isinstance(own, dict) and own.get("swap")
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if swap:
            order = self._scheduler._loads[-1]
            wrong = tuple((ids[-1], *ids[1:-1], ids[0]) for ids in order.blocks)
            self._scheduler._loads[-1] = dataclasses.replace(order, blocks=wrong)
