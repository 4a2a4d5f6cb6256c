"""What every verb shares: the output options, the error handling, the exit code.

A verb is a function with its own typer parameters that returns a `Report`. `@verb` adds `--json`, `--html`,
`--junit`, `--markdown`, `--prometheus` and `--debug`, runs it, writes the report and exits with its code.
"""

from __future__ import annotations

import contextlib
import inspect
import json as json_module
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TextIO, get_type_hints

import typer

from assay.errors import AssayError, UsageError
from assay.verdict import EXIT_BUG, Finding, Report, Severity, Verdict

# The area of a finding that a verb raises about its own use.
AREAS = {
    "check": "server", "demo": "server", "grade": "coherence", "verify": "checkpoint", "spec": "speculation",
    "compare": "fidelity", "reference": "fidelity", "rerun": "fidelity", "kv": "kv", "gap": "gap",
}  # fmt: skip


def area_of(verb: str) -> str:
    """The area of a verb's own findings; `kv eval` is of the area of `kv`."""
    return AREAS.get(verb.partition(" ")[0], "server")


PANEL = "Output"
_SHARED: dict[str, tuple[Any, Any]] = {
    "json": (
        Annotated[
            bool,
            typer.Option("--json", help="Print one JSON object (schema assay/1).", rich_help_panel=PANEL),
        ],
        False,
    ),
    "html": (
        Annotated[
            Path | None, typer.Option("--html", help="Write a self-contained page.", rich_help_panel=PANEL)
        ],
        None,
    ),
    "junit": (
        Annotated[
            Path | None, typer.Option("--junit", help="Write JUnit XML for CI.", rich_help_panel=PANEL)
        ],
        None,
    ),
    "markdown": (
        Annotated[Path | None, typer.Option("--markdown", help="Write Markdown.", rich_help_panel=PANEL)],
        None,
    ),
    "prometheus": (
        Annotated[
            Path | None,
            typer.Option("--prometheus", help="Write a Prometheus text file.", rich_help_panel=PANEL),
        ],
        None,
    ),
    "debug": (
        Annotated[
            bool, typer.Option("--debug", help="Show the traceback of a bug in assay.", rich_help_panel=PANEL)
        ],
        False,
    ),
}


@dataclass(frozen=True)
class Output:
    """Where a report goes."""

    json: bool = False
    html: Path | None = None
    junit: Path | None = None
    markdown: Path | None = None
    prometheus: Path | None = None
    debug: bool = False


def verb(name: str) -> Callable[[Callable[..., Report]], Callable[..., None]]:
    """Turn a function that returns a `Report` into a typer command called `name`."""

    def decorate(function: Callable[..., Report]) -> Callable[..., None]:
        def command(**arguments: Any) -> None:
            output = Output(**{key: arguments.pop(key) for key in _SHARED})
            raise typer.Exit(run(name, output, lambda: function(**arguments)))

        own = inspect.signature(function, eval_str=True).parameters.values()
        shared = [
            inspect.Parameter(key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for key, (annotation, default) in _SHARED.items()
        ]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + shared
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        hints = get_type_hints(function, include_extras=True)
        hints.pop("return", None)
        command.__annotations__ = hints | {key: annotation for key, (annotation, _) in _SHARED.items()}
        command.__doc__ = function.__doc__
        return command

    return decorate


def run(name: str, output: Output, body: Callable[[], Report]) -> int:
    """Run a verb, write its report everywhere it should go, and return the exit code."""
    with _stdout_kept_clean(output.json) as stdout:
        try:
            for option in ("html", "junit", "markdown", "prometheus"):
                if (path := getattr(output, option)) is not None:
                    check_writable(option, path)
        except UsageError as error:
            report = with_usage_of(name, error_report(name, error))
            write(with_environment(report), Output(json=output.json), stdout)
            return error.verdict.exit_code
        try:
            report = body()
        except AssayError as error:
            report = error_report(name, error)
        except KeyboardInterrupt:
            report = interrupted_report(name)
        except Exception as error:
            if output.debug:
                traceback.print_exc()
            print(
                f"assay: bug: {type(error).__name__}: {_one_line(error)} (run again with --debug and report it)",
                file=sys.stderr,
            )
            return EXIT_BUG
        report = with_environment(with_usage_of(name, report))
        try:
            write(report, output, stdout)
        except BrokenPipeError:
            # The reader went away (`assay … | head`). Nobody is left to tell.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        except OSError as error:
            where = f": {error.filename}" if error.filename else ""
            print(f"assay: cannot write the report: {error.strerror}{where}", file=sys.stderr)
            return Verdict.ERROR.exit_code
        return report.exit_code


def check_writable(option: str, path: Path) -> None:
    """A report that cannot be written should not cost the minutes of a run first."""
    if path.is_dir():
        raise UsageError(f"--{option} {path} is a directory", remedy="name a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"--{option} {path}: its folder does not exist", remedy="make it first")


def write(report: Report, output: Output, stdout: TextIO) -> None:
    """Write `report` to `stdout` (JSON or for people) and to the files that were asked for."""
    if output.html is not None:
        from assay.report import html

        output.html.write_text(html.render(report), encoding="utf-8")
    if output.junit is not None:
        from assay.report import junit

        output.junit.write_text(junit.render(report), encoding="utf-8")
    if output.markdown is not None:
        from assay.report import markdown

        output.markdown.write_text(markdown.render(report), encoding="utf-8")
    if output.prometheus is not None:
        from assay.report import prometheus

        output.prometheus.write_text(prometheus.render(report), encoding="utf-8")
    if output.json:
        json_module.dump(report.to_json(), stdout, ensure_ascii=False, indent=2, allow_nan=False)
        stdout.write("\n")
    else:
        from assay.report import console

        console.print_report(report, file=stdout)
    stdout.flush()


def error_report(name: str, error: AssayError) -> Report:
    """The report of a subject that could not be examined."""
    return Report(command=name, verdict=error.verdict, findings=(error.to_finding(),))


def with_usage_of(name: str, report: Report) -> Report:
    """`report` with every wrong use in the area of its verb: what reads a spec does not know which verb was asked."""
    usage = f"{area_of(name)}.usage"
    return replace(
        report,
        findings=tuple(replace(f, id=usage) if f.id.endswith(".usage") else f for f in report.findings),
    )


def usage_report(name: str, message: str) -> Report:
    """The report of a wrong command line."""
    finding = Finding(
        id=f"{area_of(name)}.usage",
        severity=Severity.ERROR,
        title=_one_line(message),
        remedies=(f"assay {name} --help" if name.partition(" ")[0] in AREAS else "assay --help",),
    )
    return Report(command=name, verdict=Verdict.ERROR, findings=(finding,))


def interrupted_report(name: str) -> Report:
    """The report of a run that was interrupted before there was anything to show."""
    finding = Finding(
        id=f"{area_of(name)}.interrupted",
        severity=Severity.WARNING,
        title="interrupted before anything was measured",
    )
    return Report(command=name, verdict=Verdict.INCONCLUSIVE, findings=(finding,), interrupted=True)


def with_environment(report: Report) -> Report:
    """`report` with the environment it was made in, unless the verb filled it."""
    if report.environment:
        return report
    from assay.environment import describe

    return replace(report, environment=describe())


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


@contextlib.contextmanager
def _stdout_kept_clean(json: bool) -> Iterator[TextIO]:
    """Yield the real stdout. With `--json` all else that would be printed there, even by a child, goes to stderr."""
    if not json:
        yield sys.stdout
        return
    try:
        real_fd = os.dup(sys.stdout.fileno())
    except (OSError, ValueError):  # captured by a test, or closed
        real = sys.stdout
        with contextlib.redirect_stdout(sys.stderr):
            yield real
        return
    sys.stdout.flush()
    fd = sys.stdout.fileno()
    os.dup2(2, fd)
    try:
        with open(real_fd, "w", encoding="utf-8", closefd=False) as real:
            yield real
    finally:
        sys.stdout.flush()
        os.dup2(real_fd, fd)
        os.close(real_fd)
