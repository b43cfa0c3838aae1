"""The ``agl`` command: a dispatcher, to which plugins add the commands. Text is made safe for terminals."""

from __future__ import annotations

import gc
import io
import logging
import re
import sys
import traceback
from typing import Any, Final

import click

from agentlightning import __version__
from agentlightning.errors import LightningError
from agentlightning.plugin.registry import PluginManager, get_manager

logger = logging.getLogger("agentlightning")


_SECTIONS: Final = {
    "Begin": "demo new doctor config plugins skill completion",
    "Run agents": "train eval compare runner trace replay",
    "Look at results": "report dashboard top runs rollouts spans resources workers ledger tokens",
    "Serve": "store gateway serve export import",
}
"""The commands in the help, by section; commands of other plugins come last."""
_YOUNG: Final = 20_000
"""Threshold of the garbage collector: at Python's default it takes a sixth of the time of importing torch."""


class _Sections(click.Group):
    """A group whose help lists the commands by section."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        left = {name: self.commands[name] for name in sorted(self.commands) if not self.commands[name].hidden}
        for title, names in {**_SECTIONS, "Other plugins": " ".join(left)}.items():
            found = {name: left.pop(name) for name in names.split() if name in left}
            if found:
                with formatter.section(title):
                    formatter.write_dl([(name, each.get_short_help_str(62)) for name, each in found.items()])


@click.group(cls=_Sections, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, package_name="lightning", prog_name="agl")
@click.option("--debug", is_flag=True, help="Show tracebacks and details of what happens.")
def cli(debug: bool) -> None:
    """Lightning: improve existing AI agents."""
    if debug:
        logger.setLevel(logging.DEBUG)
        if logging.lastResort is not None:
            logging.lastResort.setLevel(logging.DEBUG)


@cli.result_callback()
def _drop_result(*_: Any, **__: Any) -> None:
    """Discards the return value of a command: only ``ctx.exit`` sets the exit code."""


def echo(text: str = "", *, err: bool = False, nl: bool = True) -> None:
    """Prints text with its terminal escapes shown, to standard error if ``err``. Commands print only with this."""
    click.echo(printable(text), err=err, nl=nl)


def add_plugin_commands(manager: PluginManager) -> None:
    """Adds the commands of every plugin; reports and skips a plugin that fails."""
    for implementation in manager.hook.add_commands.get_hookimpls():
        try:
            implementation.function(cli)
        except Exception as error:  # isolation point: one plugin's error must not remove the commands of others
            name = implementation.plugin_name
            logger.warning("plugin %s could not add its commands: %s: %s", name, type(error).__name__, error)


def main() -> None:
    """Runs ``agl``. Prints a LightningError as one line and exits with code 2; exits with code 130 on Ctrl-C."""
    if 0 < gc.get_threshold()[0] < _YOUNG:
        gc.set_threshold(_YOUNG, 20, 20)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # on a terminal without Unicode, as Python does for stderr
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(PrintableFormatter())
    add_plugin_commands(get_manager())
    try:
        code = cli.main(prog_name="agl", standalone_mode=False)
    except click.ClickException as error:
        said = io.StringIO()
        error.show(said)
        echo(said.getvalue(), err=True, nl=False)
        sys.exit(error.exit_code)
    except (click.Abort, KeyboardInterrupt):
        echo("stopped", err=True)
        sys.exit(130)
    except LightningError as error:
        if logger.isEnabledFor(logging.DEBUG):
            echo(traceback.format_exc(), err=True, nl=False)
        echo(f"agl: {type(error).__name__}: {error}", err=True)
        sys.exit(2)
    if isinstance(code, int):  # the command called ``ctx.exit(code)``
        sys.exit(code)


_UNPRINTABLE: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and newline, and characters that change the direction of text."""


def printable(text: str) -> str:
    r"""Returns text of agents and models with terminal escapes and the like escaped as in JSON: ``\u001b``."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text.replace("\r\n", "\n"))


class PrintableFormatter(logging.Formatter):
    """Formats records so that a terminal can show them safely."""

    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
