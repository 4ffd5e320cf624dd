"""The entry point of `tktune`: puts the commands together and turns every error into one sentence and an exit code.

Commands live in files of their own; nothing here measures, builds or reads a database.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Annotated

import typer

from tktune.cli import cache, db, doctor, explain, export, import_, lookup, report, run, studies
from tktune.cli.output import print_error
from tktune.core.errors import TktuneError

_INTERRUPTED = 130  # what typer makes of KeyboardInterrupt
# UsageError's parent, the same class whichever click typer was built on.
_CLICK_ERROR: type[Exception] = typer.BadParameter.__mro__[2]

app = typer.Typer(
    name="tktune",
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Finds, proves and serves the fastest configuration of kernels that fuse communication with compute.",
    epilog="Start with: tktune doctor, then: tktune run quickstart",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from tktune import __version__

        print(f"tktune {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None: ...


app.command("doctor", epilog=doctor.EXAMPLE)(doctor.doctor)
app.command("run", epilog=run.EXAMPLE)(run.run)
app.command("lookup", epilog=lookup.EXAMPLE)(lookup.lookup)
app.command("explain", epilog=explain.EXAMPLE)(explain.explain)
app.command("report", epilog=report.EXAMPLE)(report.report)
app.command("export", epilog=export.EXAMPLE)(export.export)
app.command("import", epilog=import_.EXAMPLE)(import_.import_)
app.command("studies", epilog=studies.EXAMPLE)(studies.studies)
app.add_typer(cache.app, name="cache")
app.add_typer(db.app, name="db")


def exit_code(arguments: Sequence[str]) -> int:
    """Run one command line. Returns 0 (ok), 1 (the work failed) or 2 (the words were wrong); prints errors."""
    words = list(arguments) or ["--help"]
    options = words[: words.index("--")] if "--" in words else words
    as_json, debug = "--json" in options, "--debug" in options
    try:
        result = typer.main.get_command(app).main(words, prog_name="tktune", standalone_mode=False)
        sys.stdout.flush()
        if result == _INTERRUPTED:
            raise KeyboardInterrupt
    except TktuneError as error:
        if debug:
            traceback.print_exc()
        print_error(error.sentence, error.way_out, as_json)
        return error.exit_code
    except _CLICK_ERROR as error:
        if debug:
            traceback.print_exc()
        print_error(*_usage_sentence(error), as_json)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KeyboardInterrupt, typer.Abort):
        print_error("Stopped.", "Everything measured so far is kept; the same command continues.", as_json)
        return 1
    return result if isinstance(result, int) else 0


def main() -> None:
    """The console script."""
    arguments = sys.argv[1:]
    if "--debug" not in arguments:
        sys.excepthook = _one_sentence_hook("--json" in arguments)
    sys.exit(exit_code(arguments))


def _usage_sentence(error: BaseException) -> tuple[str, str]:
    """The sentence and the way out of a usage error of typer."""
    message = " ".join(getattr(error, "format_message", lambda: str(error))().split())
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "tktune"
    commands = sorted(getattr(context.command, "commands", {})) if context is not None else []
    if message.startswith(("Missing command", "No such command")) and commands:
        return message, f"Use one of: {', '.join(commands)}."
    return message if message.endswith((".", "?")) else f"{message}.", f"See '{path} --help'."


def _one_sentence_hook(
    as_json: bool,
) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
    """What an error that no part of tktune expected prints instead of a traceback (the exit code is 1)."""

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        words = " ".join(str(error).split())
        print_error(
            f"tktune met a defect of its own ({kind.__name__}: {words}).",
            "Run the same command with --debug and report what it prints.",
            as_json,
        )

    return hook


if __name__ == "__main__":
    main()
