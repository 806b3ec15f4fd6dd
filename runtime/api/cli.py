"""The `semspec` group: command names, and where each is implemented. Nothing is imported before it is asked for.

Errors of ours become one line on stderr and exit status 1, or 2 where a setting was wrong; a bug keeps its
traceback. An interruption exits with 130, a termination with 143, both after cleaning up.
"""

from __future__ import annotations

import io
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from types import FrameType
from typing import NoReturn

import click

from semspec.runtime.errors import ConfigError, SemspecError

__all__ = ["export_main", "main", "semspec"]

COMMANDS = {
    "bench": "semspec.calibration.bench.cli:bench",
    "build": "semspec.export.engines.cli:build",
    "calibrate": "semspec.calibration.cli:calibrate",
    "demo": "semspec.calibration.demo.cli:demo",
    "export": "semspec.export.cli:export",
    "fetch": "semspec.export.cli:fetch",
    "generate": "semspec.runtime.cli:generate",
    "inspect": "semspec.runtime.cli:inspect",
}

# what a missing import means: module -> the extra that brings it
EXTRAS = {
    "huggingface_hub": "export",
    "math_verify": "bench",
    "matplotlib": "bench",
    "onnx": "export",
    "ray": "ray",
    "tomli": "export",
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are named."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="semspec", prog_name="semspec")
def semspec() -> None:
    """Export language models into one bundle, and decode with it on your own device."""


def main() -> NoReturn:
    """Entry point of `semspec`."""
    _run(semspec, "semspec")


def export_main() -> NoReturn:
    """Entry point of `semspec-export`, the same as `semspec export`."""
    from semspec.export.cli import export

    _run(export, "semspec-export")


def _run(command: Callable[..., int | None], name: str) -> NoReturn:
    signal.signal(signal.SIGTERM, _terminate)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a character that the terminal lacks must not end an answer
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = command(prog_name=name, standalone_mode=False)  # not None where help or a version was shown
    except SemspecError as error:
        _fail(name, " ".join(str(error).split()), 2 if isinstance(error, ConfigError) else 1)
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        _fail(name, f"this command needs {error.name}; install it with: pip install 'semspec[{extra}]'", 1)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _fail(name, "interrupted", 130)
    sys.exit(status)


def _fail(name: str, message: str, status: int) -> NoReturn:
    click.echo(f"{name}: {message}", err=True)
    sys.exit(status)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    """A termination unwinds like an exception, so what is half-written is removed."""
    sys.exit(128 + number)
