"""`python -m disagg_operator`: the operator, in a cluster or against KUBECONFIG."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from typing import Annotated

import typer

from disagg_operator.cluster.api import ApiError
from disagg_operator.cluster.serve import Settings, serve
from disagg_operator.json_logs import JsonFormatter


def run(
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="The only namespace to look at; all if not given.")
    ] = None,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Reconcile DisaggDeployments until told to stop.

    The API server is that of the pod it runs in, or of KUBECONFIG. The CustomResourceDefinition must be installed:
    `disagg crds | kubectl apply -f -`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=log_level.upper(), handlers=[handler], force=True)
    logging.getLogger("kopf").setLevel(max(logging.WARNING, logging.getLogger().level))
    try:
        asyncio.run(_serve(Settings(namespace)))
    except ApiError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(1) from error


async def _serve(settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(settings, stop)


if __name__ == "__main__":
    typer.run(run)
