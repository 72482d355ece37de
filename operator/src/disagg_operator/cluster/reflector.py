"""A local copy of the API server's objects of one kind, kept by list and watch."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from disagg_operator.cluster.api import Api, ApiError
from disagg_operator.cluster.work import Key
from disagg_operator.constants import LABEL_DEPLOYMENT
from disagg_operator.observed import Object

_WATCH_SECONDS = 300
_PAUSES = (1.0, 5.0)

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Reflector(Generic[T]):
    """Objects with our labels, reduced on arrival: what is not needed is not kept.

    Args:
        reduce: from the whole object to what is kept.
        changed: called with the deployment that an object belongs to.
        beat: called whenever the server said anything; liveness is its age.
    """

    def __init__(
        self,
        api: Api,
        kind: str,
        namespace: str | None,
        selector: str,
        reduce: Callable[[Object], T],
        changed: Callable[[Key], None],
        beat: Callable[[], None],
    ) -> None:
        self.kind = kind
        self.synced = asyncio.Event()
        self._api = api
        self._namespace = namespace
        self._selector = selector
        self._reduce = reduce
        self._changed = changed
        self._beat = beat
        self._items: dict[tuple[str, str], tuple[Key, T]] = {}
        self._by_owner: dict[Key, set[tuple[str, str]]] = {}

    def of(self, key: Key) -> Iterable[T]:
        """What is known of a deployment's objects."""
        return [self._items[one][1] for one in sorted(self._by_owner.get(key, ()))]

    async def run(self) -> None:
        """List and watch until cancelled; whatever the server does, it is asked again."""
        while True:
            try:
                await self._list_and_watch()
            except ApiError as error:
                if error.status != 410:
                    logger.warning("watch failed", extra={"kind": self.kind, "error": str(error)})
                    await asyncio.sleep(random.uniform(*_PAUSES))

    async def _list_and_watch(self) -> None:
        page = await self._api.list_all(self.kind, self._namespace, self._selector)
        self._beat()
        gone = set(self._items)
        for item in page.items:
            gone.discard(self._store(item))
        for name in gone:
            self._drop(name)
        self.synced.set()
        version = page.version
        while True:
            async for change, item in self._api.watch(
                self.kind, self._namespace, self._selector, version, _WATCH_SECONDS
            ):
                self._beat()
                version = item["metadata"]["resourceVersion"]
                if change == "DELETED":
                    self._drop((item["metadata"]["namespace"], item["metadata"]["name"]))
                elif change != "BOOKMARK":
                    self._store(item)

    def _store(self, item: Object) -> tuple[str, str]:
        metadata = item["metadata"]
        name = (metadata["namespace"], metadata["name"])
        owner = Key(metadata["namespace"], metadata["labels"][LABEL_DEPLOYMENT])
        kept = self._reduce(item)
        before = self._items.get(name)
        if before == (owner, kept):
            return name
        if before is not None and before[0] != owner:
            self._drop(name)
        self._items[name] = (owner, kept)
        self._by_owner.setdefault(owner, set()).add(name)
        self._changed(owner)
        return name

    def _drop(self, name: tuple[str, str]) -> None:
        found = self._items.pop(name, None)
        if found is not None:
            self._by_owner[found[0]].discard(name)
            if not self._by_owner[found[0]]:
                del self._by_owner[found[0]]
            self._changed(found[0])
