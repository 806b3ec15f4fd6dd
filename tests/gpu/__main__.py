"""The steps of run.sh as commands: python -m gpu machine | opens | agrees | times | report.

Only this file prints: messages on stderr; of `report` tables and, last, one JSON line on stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from gpu.findings import REFUSED, Findings, read_findings, run_step
from gpu.summary import broken, summarize
from gpu.tables import write_tables

ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "machine": (),
    "opens": ("backend",),
    "agrees": ("backend", "graph", "precision"),
    "times": ("backend", "precision", "shape"),
    "report": (),
}


def main() -> int:
    options = _parser().parse_args()
    if options.command == "report":
        summary = summarize(read_findings(options.findings))
        sys.stdout.write(f"{write_tables(summary)}\n{json.dumps(summary, allow_nan=False)}\n")
        return int(broken(summary))
    findings = Findings(options.findings, options.step)
    try:
        body = _body(options)
    except ImportError as error:  # the report must come all the same
        findings.add(failed=f"semspec cannot be imported here ({error}); install it, or give its wheels")
        return 1
    reason = run_step(findings, body)
    if reason:
        sys.stderr.write(f"{options.step}: {reason}\n")
    return REFUSED if reason else 0


def _body(options: argparse.Namespace) -> Callable[[Findings], None]:
    """What the command does."""
    from gpu import steps

    if options.command == "machine":
        return steps.describe_machine
    given: dict[str, Any] = {name: getattr(options, name) for name in ARGUMENTS[options.command]}
    given["folder"] = options.work
    if options.command == "opens":
        return partial(steps.open_one, **given)
    if options.command == "agrees":
        return partial(steps.agree, **given)
    return partial(steps.time_shape, **given, seconds=options.seconds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name, arguments in ARGUMENTS.items():
        command = commands.add_parser(name)
        for argument in arguments:
            command.add_argument(argument)
        command.add_argument("--findings", type=Path, required=True, help="the file of all steps")
        command.add_argument("--step", default=name, help="what this one is called there")
        command.add_argument("--work", type=Path, default=Path.cwd(), help="an empty folder")
        command.add_argument("--seconds", type=float, default=0.3, help="to spend on each figure")
    return parser


if __name__ == "__main__":
    sys.exit(main())
