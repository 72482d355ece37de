"""The Kubernetes API as the operator uses it: a few verbs over whole objects.

Over `kubernetes.aio`'s client for configuration, TLS and credentials. Its dynamic client is not used: it writes a
discovery cache to disk, and its watch reads lines of 64 KiB at most, where a plan is larger.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
from kubernetes.aio import client, config
from kubernetes.aio.client.exceptions import ApiException

from disagg_operator.constants import API_VERSION, FIELD_MANAGER, KIND
from disagg_operator.crd import PLURAL
from disagg_operator.observed import Object

_PAGE = 500
_TIMEOUT = 30.0
_APPLY = "application/apply-patch+yaml"
_MERGE = "application/merge-patch+json"

_RESOURCES = {
    "ConfigMap": ("v1", "configmaps"),
    "Pod": ("v1", "pods"),
    "Event": ("v1", "events"),
    "Deployment": ("apps/v1", "deployments"),
    KIND: (API_VERSION, PLURAL),
}


class ApiError(Exception):
    """The API server refused a request, or did not answer it.

    Attributes:
        status: HTTP status; 0 if there was no answer.
        reason: Kubernetes' word for it, such as `Conflict`.
        terminating: nothing can be made because the namespace is going.
    """

    def __init__(self, status: int, reason: str, message: str, *, terminating: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.terminating = terminating

    @property
    def not_found(self) -> bool:
        """Whether the object, or its namespace, is not there."""
        return self.status == 404


@dataclass(frozen=True)
class Page:
    """Objects of a list, and the version to watch from."""

    items: list[Object]
    version: str


class Api:
    """The API server of one configuration; close it when done.

    Args:
        wrote: called with verb and kind after every write that was taken.
    """

    def __init__(self, configuration: client.Configuration, wrote: Callable[[str, str], None]) -> None:
        self.configuration = configuration
        self.client = client.ApiClient(configuration)
        self._wrote = wrote

    async def close(self) -> None:
        """Close connections."""
        await self.client.close()  # type: ignore[no-untyped-call]

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """An object, or None if it is not there."""
        try:
            return await self._json("GET", path(kind, namespace, name))
        except ApiError as error:
            if error.not_found:
                return None
            raise

    async def list_all(self, kind: str, namespace: str | None, selector: str = "") -> Page:
        """All objects that a label selector takes, read in pages."""
        items: list[Object] = []
        query = [("limit", str(_PAGE)), ("labelSelector", selector)]
        more = ""
        while True:
            answer = await self._json("GET", path(kind, namespace), [*query, ("continue", more)] if more else query)
            items += answer.get("items") or []
            more = answer["metadata"].get("continue") or ""
            if not more:
                return Page(items, answer["metadata"]["resourceVersion"])

    async def watch(
        self, kind: str, namespace: str | None, selector: str, version: str, seconds: int
    ) -> AsyncIterator[tuple[str, Object]]:
        """Changes since a version, as `(type, object)`, until the server ends the watch after `seconds`.

        Raises:
            ApiError: with status 410 if the version is too old to go on from.
        """
        query = [
            ("watch", "true"),
            ("labelSelector", selector),
            ("resourceVersion", version),
            ("allowWatchBookmarks", "true"),
            ("timeoutSeconds", str(seconds)),
        ]
        response = await self._send("GET", path(kind, namespace), query, timeout=seconds + _TIMEOUT)
        try:
            async for line in _lines(response):
                change = json.loads(line)
                if change["type"] == "ERROR":
                    status = change["object"]
                    raise ApiError(int(status.get("code", 0)), str(status.get("reason")), str(status.get("message")))
                yield change["type"], change["object"]
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ApiError(0, "NoAnswer", f"watch of {kind}: {error or type(error).__name__}") from error
        finally:
            response.close()

    async def apply(self, item: Object, *, force: bool, subresource: str = "") -> Object:
        """Server-side apply with our field manager.

        Args:
            force: take over fields that others own.
        """
        metadata = item["metadata"]
        where = path(item["kind"], metadata.get("namespace"), metadata["name"], subresource)
        query = [("fieldManager", FIELD_MANAGER), ("force", str(force).lower())]
        answer = await self._json("PATCH", where, query, item, _APPLY)
        self._wrote("apply", item["kind"])
        return answer

    async def scale(self, kind: str, namespace: str, name: str, replicas: int) -> None:
        """Change nothing of a workload but its replicas."""
        body = {"spec": {"replicas": replicas}}
        query = [("fieldManager", FIELD_MANAGER)]
        await self._json("PATCH", path(kind, namespace, name, "scale"), query, body, _MERGE)
        self._wrote("scale", kind)

    async def create(self, item: Object) -> Object:
        """Create an object."""
        where = path(item["kind"], item["metadata"].get("namespace"))
        answer = await self._json("POST", where, [("fieldManager", FIELD_MANAGER)], item, "application/json")
        self._wrote("create", item["kind"])
        return answer

    async def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """Delete the object of that UID, its dependents after it; nothing happens if it is gone or another."""
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Background",
            "preconditions": {"uid": uid},
        }
        try:
            await self._json("DELETE", path(kind, namespace, name), [], body, "application/json")
        except ApiError as error:
            if error.status not in (404, 409):
                raise
        else:
            self._wrote("delete", kind)

    async def _json(
        self,
        method: str,
        where: str,
        query: list[tuple[str, str]] | None = None,
        body: Mapping[str, Any] | None = None,
        content: str = "",
    ) -> Object:
        response = await self._send(method, where, query or [], body, content)
        try:
            return dict(json.loads(await response.read()))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise ApiError(0, "NoAnswer", f"{method} {where}: {error or type(error).__name__}") from error

    async def _send(
        self,
        method: str,
        where: str,
        query: list[tuple[str, str]],
        body: Mapping[str, Any] | None = None,
        content: str = "",
        timeout: float = _TIMEOUT,
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": "application/json"} | ({"Content-Type": content} if content else {})
        kept = [(key, value) for key, value in query if value]
        request = await self.client.param_serialize(
            method, where, query_params=kept, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        try:
            answer = await self.client.call_api(*request, _request_timeout=timeout)
        except ApiException as error:
            raise ApiError(error.status or 0, str(error.reason), str(error.reason)) from error
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise ApiError(0, "NoAnswer", f"{method} {where}: {error or type(error).__name__}") from error
        if 200 <= answer.status <= 299:
            response: aiohttp.ClientResponse = answer.response
            return response
        raise _refused(answer.status, await answer.response.read(), f"{method} {where}")


async def connect(wrote: Callable[[str, str], None]) -> Api:
    """The API server of the pod that this runs in, or else of `KUBECONFIG`.

    Args:
        wrote: see `Api`.

    Raises:
        ApiError: neither says where it is.
    """
    configuration = client.Configuration()
    try:
        try:
            config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        except config.ConfigException:
            await config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except (config.ConfigException, OSError) as error:
        raise ApiError(0, "NoConfiguration", f"neither in a pod nor a usable KUBECONFIG: {error}") from error
    return Api(configuration, wrote)


def path(kind: str, namespace: str | None, name: str = "", subresource: str = "") -> str:
    """Path of an object, or of the collection that it is in."""
    version, plural = _RESOURCES[kind]
    root = f"/api/{version}" if "/" not in version else f"/apis/{version}"
    inside = f"/namespaces/{namespace}" if namespace else ""
    return "/".join(part for part in (f"{root}{inside}/{plural}", name, subresource) if part)


def _refused(status: int, body: bytes, what: str) -> ApiError:
    try:
        answer = json.loads(body)
        causes = (answer.get("details") or {}).get("causes") or []
        return ApiError(
            status,
            str(answer.get("reason") or status),
            str(answer.get("message") or what),
            terminating=any(cause.get("reason") == "NamespaceTerminating" for cause in causes),
        )
    except (ValueError, AttributeError):
        return ApiError(status, str(status), f"{what}: {body[:200].decode(errors='replace')}")


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line:
                yield line
