"""What every command does alike: options that they share, and how a command ends.

Exit codes: 0 fine, 1 refused or wrong, 2 usage, 130 interrupted.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import typer

from disagg_operator.console import error
from disagg_operator.documents import UsageError, read_deployments
from disagg_operator.local.processes import LocalError
from disagg_operator.reconcile import Snapshot
from disagg_plan.errors import PlanError, Refusal

Result = TypeVar("Result")

File = Annotated[
    Path, typer.Option("-f", "--file", help="Deployment file, - for standard input; several YAML documents are fine.")
]
Name = Annotated[str | None, typer.Option("--name", help="Which deployment of the file, if it holds several.")]


class Output(StrEnum):
    """What most commands print."""

    table = "table"
    json = "json"


def finish(work: Coroutine[Any, Any, Result]) -> Result:
    """Run to the end, or to the exit code that says why not."""

    async def interruptible() -> Result:
        task = asyncio.current_task()
        stopping = False

        def stop() -> None:
            # Once only: a second signal must not interrupt the cleaning up that the first one began.
            nonlocal stopping
            if not stopping and task is not None:
                stopping = True
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, stop)
        return await work

    try:
        return asyncio.run(interruptible())
    except (KeyboardInterrupt, asyncio.CancelledError):
        error("interrupted")
        raise typer.Exit(130) from None
    except PlanError as failure:
        refused(failure)
    except (LocalError, OSError) as failure:
        error(str(failure))
        raise typer.Exit(1) from failure


def read(file: Path, name: str | None) -> Snapshot:
    """The deployment that a command is about."""
    try:
        return read_deployments(file).snapshot(name)
    except UsageError as failure:
        usage(str(failure))
    except Refusal as failure:
        refused(failure)


def usage(message: str) -> NoReturn:
    """End: the command was called wrongly."""
    error(message)
    raise typer.Exit(2)


def refused(failure: PlanError | None) -> NoReturn:
    """End: what was asked for cannot work, with the field, the numbers and the way out."""
    if isinstance(failure, Refusal):
        error(f"refused: {failure.code}")
        error(f"  field   {failure.field}")
        error(f"  reason  {failure.message}")
        error(f"  remedy  {failure.remedy}")
    elif failure is not None:
        error(f"{failure.code}: {failure.message}")
    raise typer.Exit(1)
