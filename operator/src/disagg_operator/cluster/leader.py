"""Leader election by a Lease: of several operators one works, the others stand by."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
from kubernetes.aio import client
from kubernetes.aio.client.exceptions import ApiException
from kubernetes.aio.leaderelection.electionconfig import Config
from kubernetes.aio.leaderelection.leaderelection import LeaderElection
from kubernetes.aio.leaderelection.leaderelectionrecord import LeaderElectionRecord
from kubernetes.aio.leaderelection.resourcelock.leaselock import LeaseLock

LEASE = "disagg-operator"
LEASE_SECONDS = 15
_RENEW_SECONDS = 10
_RETRY_SECONDS = 2

logger = logging.getLogger(__name__)


class LeadershipLost(Exception):
    """Another operator may work now: this one must end at once."""


class _Lock(LeaseLock):
    """A lock that takes a silent API server for a failed try; the library lets the exception end the election."""

    async def get(
        self, name: str, namespace: str
    ) -> tuple[bool, LeaderElectionRecord] | tuple[bool, Exception] | tuple[bool, None]:
        try:
            return await super().get(name, namespace)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return False, ApiException(status=0, reason=f"no answer: {error or type(error).__name__}")

    async def create(self, name: str, namespace: str, election_record: LeaderElectionRecord) -> bool:
        # The library's own passes `pretty=True`, which its client refuses: only text is taken.
        lease = client.V1Lease(metadata=client.V1ObjectMeta(name=name), spec=self.update_lease(election_record))
        try:
            await self.api_instance.create_namespaced_lease(namespace, lease)
        except (ApiException, aiohttp.ClientError, OSError, TimeoutError) as error:
            logger.warning("lease not created", extra={"error": str(error)[:200]})
            return False
        return True

    async def update(self, name: str, namespace: str, updated_record: LeaderElectionRecord) -> bool:
        return await self._tried(super().update(name, namespace, updated_record))

    async def _tried(self, attempt: Awaitable[bool]) -> bool:
        try:
            return await attempt
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            logger.warning("lease not written", extra={"error": str(error) or type(error).__name__})
            return False


async def lead(
    api_client: client.ApiClient,
    namespace: str,
    identity: str,
    stop: asyncio.Event,
    work: Callable[[], Awaitable[None]],
) -> None:
    """Wait until this operator leads, then work until the work ends; the lease is given back at the end.

    Args:
        stop: set when the operator is to end; one that does not lead yet then stops waiting.

    Raises:
        LeadershipLost: the lease could not be renewed in time.
    """
    outcome: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    lock = _Lock(LEASE, namespace, identity, api_client)

    leading = asyncio.Event()

    async def started() -> None:
        leading.set()
        logger.info("leading", extra={"identity": identity})
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - handed to the caller, whatever it is
            _settle(outcome, error)
        else:
            _settle(outcome, None)

    async def stopped() -> None:
        _settle(outcome, LeadershipLost(f"lease {namespace}/{LEASE} was not renewed for {_RENEW_SECONDS} s"))

    config = Config(lock, LEASE_SECONDS, _RENEW_SECONDS, _RETRY_SECONDS, started, stopped)
    election = asyncio.create_task(LeaderElection(config).run())
    standing_by = asyncio.create_task(stop.wait())
    ends: set[asyncio.Future[Any]] = {election, outcome}
    try:
        await asyncio.wait({*ends, standing_by}, return_when=asyncio.FIRST_COMPLETED)
        if leading.is_set():
            # The work sees the same event, and ends in its own time.
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        for end in ends:
            if end.done():
                await end
    finally:
        standing_by.cancel()
        election.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await election
        await _give_back(api_client, namespace, identity)


def _settle(outcome: asyncio.Future[None], error: Exception | None) -> None:
    if outcome.done():
        return
    if error is None:
        outcome.set_result(None)
    else:
        outcome.set_exception(error)


async def _give_back(api_client: client.ApiClient, namespace: str, identity: str) -> None:
    """Let the next operator begin at once; it would wait for the lease to run out otherwise."""
    leases = client.CoordinationV1Api(api_client=api_client)
    try:
        lease = await leases.read_namespaced_lease(LEASE, namespace)
        if lease.spec is not None and lease.spec.holder_identity == identity:
            lease.spec.holder_identity = None
            await leases.replace_namespaced_lease(LEASE, namespace, lease)
    except (ApiException, aiohttp.ClientError, OSError, TimeoutError) as error:
        logger.info("lease not given back", extra={"error": str(error)[:200]})
