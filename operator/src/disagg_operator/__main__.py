"""`python -m disagg_operator`: the operator, in a cluster or against KUBECONFIG."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from typing import Annotated

import typer

from disagg_operator.cluster.api import ApiError
from disagg_operator.cluster.leader import LeadershipLost
from disagg_operator.cluster.serve import Settings, serve
from disagg_operator.json_logs import JsonFormatter


def run(
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", help="The only namespace to look at; all if not given.")
    ] = None,
    election: Annotated[
        str | None,
        typer.Option(
            "--leader-election",
            metavar="NAMESPACE",
            envvar="DISAGG_ELECTION_NAMESPACE",
            help="Elect a leader by a Lease in this namespace. Without it, run one operator only.",
        ),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Serve /healthz, /readyz and /metrics; `:8080` for all addresses."),
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
        asyncio.run(_serve(Settings(namespace, election, _address(http))))
    except (ApiError, LeadershipLost, OSError) as error:
        logging.getLogger("disagg_operator").critical("ended", extra={"error": str(error)})
        raise typer.Exit(1) from error


def _address(text: str | None) -> tuple[str, int] | None:
    if text is None:
        return None
    host, _, port = text.rpartition(":")
    if not port.isdecimal() or int(port) > 65535:
        raise typer.BadParameter(f"{text!r} is not HOST:PORT", param_hint="--http")
    return host.strip("[]"), int(port)


async def _serve(settings: Settings) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await serve(settings, stop)


if __name__ == "__main__":
    application = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    application.command()(run)
    application(prog_name="python -m disagg_operator")
