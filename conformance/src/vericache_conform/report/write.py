"""Write a report to files, in the forms that were asked for; each file appears whole or not at all."""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from vericache_conform.report.html import html_page
from vericache_conform.report.junit import junit_xml
from vericache_conform.report.markdown import markdown
from vericache_conform.report.model import Report
from vericache_core.errors import UsageError

FORMATS: dict[str, tuple[str, Callable[[Report], str]]] = {
    "report": ("JSON lines, for replay, report and compare", lambda report: "\n".join(report.lines()) + "\n"),
    "junitxml": ("JUnit XML", junit_xml),
    "markdown": ("Markdown", markdown),
    "html": ("one self-contained page with plots", html_page),
}


def add_format_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare an argument for each form."""
    for name, (words, _) in FORMATS.items():
        parser.add_argument(f"--{name}", metavar="FILE", help=f"write {words}")


def write_formats(report: Report, args: argparse.Namespace) -> None:
    """Write what the arguments ask for.

    Raises:
        UsageError: a file cannot be written.
    """
    for name, (_, render) in FORMATS.items():
        target = getattr(args, name, None)
        if target is not None:
            write_whole(Path(target), render(report))


def write_whole(path: Path, text: str) -> None:
    """Write through a temporary file in the same folder, so that nobody ever reads half of it."""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as stream:
                stream.write(text)
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(temporary, 0o666 & ~mask)  # noqa: PTH101  # a name, not a Path
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be written", cause=error.strerror) from error
