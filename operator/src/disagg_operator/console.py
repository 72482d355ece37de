"""What people see: tables and progress through rich, which drops colours and bars where there is no terminal."""

from __future__ import annotations

import json
import sys

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from disagg_operator.describe import figures, mapping, topology
from disagg_operator.local.drive import Account, Outcome
from disagg_operator.local.vllm import VllmAccount, describe
from disagg_plan import wire

_out = Console(highlight=False, soft_wrap=True)
_err = Console(stderr=True, highlight=False, soft_wrap=True)


def plain(text: str) -> None:
    """A line of result."""
    _out.print(text, markup=False)


def emit(text: str) -> None:
    """A document on standard output.

    Raises:
        OSError: it cannot be written; nothing may pretend otherwise.
    """
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def progress(text: str) -> None:
    """A line about what goes on, beside the result."""
    _err.print(text, markup=False)


def error(text: str) -> None:
    """A line for a person who must act."""
    _err.print(text, style="red", markup=False)


def mapping_table(plan: wire.Plan, console: Console = _out) -> None:
    """Who reads what from whom."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in ("DECODE", "PREFILL", "GROUP", "LAYERS", "UNITS"):
        table.add_column(heading, no_wrap=True)
    for heading in ("B/TOKEN", "COPIES/BLOCK", "SHORTEST"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in mapping(plan):
        table.add_row(
            f"d{row.destination}",
            f"p{row.source}",
            row.group,
            row.layers,
            row.units,
            f"{row.bytes_per_token:,}",
            str(row.copies),
            f"{row.shortest:,} B",
        )
    console.print(table)


class TerminalReporter:
    """Shows a run: progress on a terminal only, and nothing on standard output when that is to hold one document."""

    def __init__(self, as_json: bool) -> None:
        self._json = as_json
        self._console = _err if as_json else _out
        self._progress: Progress | None = None
        self._failed = 0

    def line(self, text: str) -> None:
        """See `Reporter`."""
        self._console.print(text, markup=False)

    def mapping(self, plan: wire.Plan) -> None:
        """See `Reporter`."""
        self.line(topology(plan))
        mapping_table(plan, self._console)
        for line in figures(plan):
            self.line(line)

    def begin(self, total: int) -> None:
        """See `Reporter`."""
        if _err.is_terminal:
            self._progress = Progress(
                TextColumn("requests"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[note]}"),
                TimeElapsedColumn(),
                console=_err,
                transient=True,
            )
            self._progress.add_task("requests", total=total, note="")
            self._progress.start()

    def advance(self, outcome: Outcome) -> None:
        """See `Reporter`."""
        if outcome.error:
            self._failed += 1
            if self._failed == 1:
                error(f"{outcome.request} failed: {outcome.error}")
        if self._progress is not None:
            note = f"{self._failed} failed" if self._failed else ""
            self._progress.update(self._progress.task_ids[0], advance=1, note=note)

    def end(self) -> None:
        """See `Reporter`."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None

    def finished(self, account: Account | VllmAccount) -> None:
        """See `Reporter`."""
        if self._json:
            emit(json.dumps(account.document()))
        elif isinstance(account, VllmAccount):
            self.rows(describe(account))
        else:
            self._account(account)

    def _account(self, account: Account) -> None:
        document = account.document()
        speed, transfer, request = (
            document[key] for key in ("gigabytesPerSecond", "transferSeconds", "requestSeconds")
        )
        rows = [
            ("requests", f"{document['requests']} ({document['failedRequests']} failed)"),
            ("moved", f"{document['movedBytes'] / 1e9:.3f} GB in {document['seconds']:.1f} s"),
            ("speed", f"{speed['transferP50']} GB/s per transfer (p50), {speed['run']} GB/s with filling and checking"),
            ("transfer", f"p50 {transfer['p50'] * 1e3:.1f} ms, p99 {transfer['p99'] * 1e3:.1f} ms"),
            ("request", f"p50 {request['p50'] * 1e3:.1f} ms, p99 {request['p99'] * 1e3:.1f} ms"),
            ("verified bytes", f"{document['verifiedBytes']:,}"),
            ("wrong bytes", f"{document['wrongBytes']:,}"),
        ]
        for code, count in sorted(document["failureReasons"].items()):
            rows.append(("failed", f"{count} x {code}"))
        self.rows(rows + [("problem", problem) for problem in account.problems])

    def rows(self, rows: list[tuple[str, str]]) -> None:
        """A summary, name and value a line."""
        width = max(len(name) for name, _ in rows)
        for name, value in rows:
            self.line(f"{name.ljust(width)}  {value}")
