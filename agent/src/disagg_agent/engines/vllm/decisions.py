"""What the scheduler half decides: values in, orders for the workers out. Knows nothing of vLLM's classes.

`kv_transfer_params` keep the names and meaning that routers pass through for vLLM's own connectors. What is ours
stands under one key of our own, `disagg`; a peer that lacks it is refused by name.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

OWN_KEY = "disagg"

_LONGEST = 256
"""Characters of a name that agents accept; a client may choose the id of its request, and a longer one."""

Blocks = tuple[tuple[int, ...], ...]
"""Block ids of a request, one list per KV cache group."""


@dataclass(frozen=True)
class LoadOrder:
    """Load positions `[start, tokens)` of a request from where `params` say; `refusal` if they say nothing usable."""

    request: str
    tokens: int
    start: int
    blocks: Blocks
    replica: str
    source_request: str
    generation: str
    host: str
    port: int
    refusal: str = ""


@dataclass(frozen=True)
class HoldOrder:
    """Keep a finished request's pages until decode has read them."""

    request: str
    generation: str
    tokens: int
    blocks: Blocks


@dataclass(frozen=True)
class Orders:
    """What every worker does in one step; `idle` if that step computes nothing."""

    loads: tuple[LoadOrder, ...] = ()
    holds: tuple[HoldOrder, ...] = ()
    aborts: tuple[str, ...] = ()
    idle: bool = False


@dataclass(frozen=True)
class Identity:
    """Where decode finds this prefill replica: what our `kv_transfer_params` say."""

    replica: str
    host: str
    port: int
    plan: str
    tensor: int
    pipeline: int


@dataclass
class SchedulerHalf:
    """The decisions of one engine.

    Args:
        identity: this replica.
        block_tokens: tokens of a block, per KV cache group.
        new_generation: makes a unique word for each hold.
    """

    identity: Identity
    block_tokens: Sequence[int]
    new_generation: Callable[[], str]
    _loads: list[LoadOrder] = field(default_factory=list)
    _holds: list[HoldOrder] = field(default_factory=list)
    _aborts: list[str] = field(default_factory=list)
    _loading: set[str] = field(default_factory=set)

    def matched(self, params: Mapping[str, Any] | None, prompt: int, computed: int) -> tuple[int, bool]:
        """Tokens beyond `computed` that prefill holds, and whether they come asynchronously.

        Args:
            prompt: tokens of the prompt; prefill has the cache of all of them.
            computed: tokens that are in the local prefix cache, whole blocks.
        """
        if not params or not params.get("do_remote_prefill"):
            return 0, False
        missing = prompt - computed
        return (missing, True) if missing > 0 else (0, False)

    def allocated(
        self, request: str, params: dict[str, Any] | None, prompt: int, external: int, blocks: Sequence[Sequence[int]]
    ) -> None:
        """Pages were allocated for a request; called a second time when an asynchronous load has ended.

        Args:
            params: marked as used, so that the same request is never loaded twice (after a preemption it is
            recomputed). external: tokens to load; 0 the second time. blocks: block ids of the whole request, local
            prefix included.
        """
        if not params or not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False
        start = prompt - external
        missing = [
            ids[start // tokens :] if external else () for ids, tokens in zip(blocks, self.block_tokens, strict=True)
        ]
        self._loads.append(_load_order(request, params, prompt, start, missing))
        if external > 0:
            self._loading.add(request)

    def loaded(self, requests: Sequence[str] | set[str]) -> None:
        """Workers report loads as ended, well or not."""
        self._loading.difference_update(requests)

    def finished(
        self,
        request: str,
        params: Mapping[str, Any] | None,
        complete: bool,
        computed: int,
        blocks: Sequence[Sequence[int]],
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over.

        Args:
            complete: it ended by itself (length or stop), not by an abort or an error.
            computed: tokens whose cache its pages hold.

        Returns:
            Whether its pages must stay, and the `kv_transfer_params` for the decode side.
        """
        if request in self._loading:
            # Aborted while its load runs: vLLM keeps the pages until the workers report the load as ended.
            self._loading.discard(request)
            self._aborts.append(request)
            return False, None
        if not params:
            return False, None
        if params.get("do_remote_prefill"):
            # Aborted before it was scheduled: prefill still holds pages for it, and must hear that nobody comes.
            self._loads.append(_load_order(request, params, computed, computed, ()))
            return False, None
        if not params.get("do_remote_decode") or not complete or not any(blocks):
            return False, None
        generation = self.new_generation()
        frozen = tuple(tuple(group) for group in blocks)
        self._holds.append(HoldOrder(request, generation, computed, frozen))
        identity = self.identity
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [list(group) for group in frozen],
            "remote_engine_id": identity.replica,
            "remote_request_id": wire_id(request),
            "remote_host": identity.host,
            "remote_port": identity.port,
            "tp_size": identity.tensor,
            "pp_size": identity.pipeline,
            "dcp_size": 1,
            "remote_num_tokens": computed,
            OWN_KEY: {"generation": generation, "plan": identity.plan},
        }

    def orders(self, idle: bool = False) -> Orders:
        """Everything decided since the last call, for a step that computes something unless `idle`."""
        orders = Orders(tuple(self._loads), tuple(self._holds), tuple(self._aborts), idle)
        self._loads, self._holds, self._aborts = [], [], []
        return orders


def wire_id(request: str) -> str:
    """A request's id as agents know it: the engine's own, or a digest of one that is too long for them."""
    return request if len(request) <= _LONGEST else hashlib.sha256(request.encode()).hexdigest()


def _load_order(
    request: str, params: Mapping[str, Any], tokens: int, start: int, blocks: Sequence[Sequence[int]]
) -> LoadOrder:
    own = params.get(OWN_KEY)
    generation = own.get("generation") if isinstance(own, Mapping) else None
    names = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")
    said = {**{name: params.get(name) for name in names}, f"{OWN_KEY}.generation": generation}
    refusal = _refusal(said)
    known: Mapping[str, Any] = {} if refusal else said
    return LoadOrder(
        request=request,
        tokens=tokens,
        start=start,
        blocks=tuple(tuple(group) for group in blocks),
        replica=known.get("remote_engine_id", ""),
        source_request=known.get("remote_request_id", ""),
        generation=known.get(f"{OWN_KEY}.generation", ""),
        host=known.get("remote_host", ""),
        port=known.get("remote_port", 0),
        refusal=refusal,
    )


def _refusal(said: Mapping[str, Any]) -> str:
    """Why these `kv_transfer_params` cannot be followed; they come from a client and may hold anything."""
    missing = [name for name, value in said.items() if value in (None, "")]
    if missing:
        return f"kv_transfer_params lack {', '.join(missing)}: the prefill engine does not run the disagg connector"
    for name, value in said.items():
        if name == "remote_port":
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 65536:
                return f"kv_transfer_params: {name} is {str(value)[:40]!r}, not a port"
        elif not isinstance(value, str) or len(value) > _LONGEST or not value.isprintable():
            return f"kv_transfer_params: {name} is {str(value)[:40]!r}, not a name of at most {_LONGEST} characters"
    return ""
