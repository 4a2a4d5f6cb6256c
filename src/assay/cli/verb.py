"""What every verb shares: options made from its dataclass, the output options, the error handling,
the exit code.

A verb is a function that returns a `Report`. `@verb` adds the options that its dataclass declares
(`assay.options`) and those of `Output`; the command is built when it is asked for, so that `assay
--help` imports no verb.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, TextIO, get_args, get_type_hints

import typer
import typer.core

from assay.deadline import settled
from assay.engines.device import out_of_memory
from assay.errors import AssayError, UsageError
from assay.extras import not_installed
from assay.options import Declared, Options, declared_options, option
from assay.plugins import Plugin, culprit, get, names
from assay.signals import asked_again, received, writing
from assay.verdict import EXIT_BUG, Finding, Report, Severity, Verdict

# The area of a finding that a verb raises about its own use.
AREAS = {
    "diff": "diff",
    "check": "server",
    "watch": "server",
    "demo": "server",
    "grade": "coherence",
    "verify": "checkpoint",
    "spec": "speculation",
    "compare": "fidelity",
    "reference": "fidelity",
    "rerun": "fidelity",
    "kv": "kv",
    "gap": "gap",
    "gate": "server",
    "card": "fidelity",
    "table": "fidelity",
    "doctor": "server",
    "bundle": "server",
    "heads": "speculation",
}


def area_of(verb: str) -> str:
    """The area of a verb's own findings; `kv eval` is of the area of `kv`."""
    return AREAS.get(verb.partition(" ")[0], "server")


PANEL = "Output"
STDOUT = "-"
"""The value of `--json` without a file."""


@dataclass(frozen=True)
class Output(Options):
    """Where a report goes."""

    verbose: bool = option(
        False, "Show every table, text, cause and piece of evidence.", panel=PANEL, short="-v"
    )
    json: str | None = option(
        None,
        "Print one JSON object (schema assay/1) instead; with FILE, write it there beside what is"
        " printed.",
        metavar="[FILE]",
        panel=PANEL,
    )
    html: Path | None = option(None, "Write a self-contained page.", panel=PANEL)
    junit: Path | None = option(None, "Write JUnit XML for CI.", panel=PANEL)
    markdown: Path | None = option(None, "Write Markdown.", panel=PANEL)
    prometheus: Path | None = option(None, "Write a Prometheus text file.", panel=PANEL)
    report: tuple[str, ...] = option(
        (),
        "Write the report in a format by name, such as one of a plug-in.",
        metavar="NAME=FILE",
        panel=PANEL,
    )
    debug: bool = option(False, "Show the traceback of a bug in assay.", panel=PANEL)


# From a function and a dataclass to a command.


@dataclass(frozen=True)
class Verb:
    """A command: `arguments` are the help texts of the function's own parameters, `options` is
    `module:dataclass`.
    """

    name: str
    function: Callable[..., Report]
    options: str
    arguments: Mapping[str, str]

    @property
    def sentence(self) -> str:
        """What it does: the first paragraph of the function's docstring."""
        return _one_line((inspect.getdoc(self.function) or "").partition("\n\n")[0])

    def command(self) -> Any:
        """The command of typer, made from the options that the dataclass declares."""
        module, _, name = self.options.partition(":")
        declared = declared_options(getattr(import_module(module), name)) if module else {}
        in_order = sorted(declared.values(), key=lambda option: not option.required)
        outputs = declared_options(Output)
        hints = {name: d.kind for name, d in declared.items()} | get_type_hints(self.function)
        parameters = [inspect.Parameter("context", _KEYWORD, annotation=typer.Context)]
        parameters += [_argument(name, help, hints[name]) for name, help in self.arguments.items()]
        parameters += [_option(d) for d in (*in_order, *outputs.values()) if d.listed]

        def command(context: typer.Context, **values: Any) -> None:
            given = {name: value for name, value in values.items() if _is_given(context, name)}
            given |= {
                name: not given[name]
                for name in given
                if name in declared and declared[name].inverted
            }
            output = Output.of({name: given.pop(name) for name in outputs if name in given})
            raise typer.Exit(run(self.name, output, lambda: self.function(**given)))

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        command.__doc__ = self.function.__doc__
        single = typer.Typer(**TYPER)
        single.command(self.name.rpartition(" ")[2], cls=_Command)(command)
        return typer.main.get_command(single)


TYPER: Mapping[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,
    "context_settings": {"help_option_names": ["-h", "--help"], "max_content_width": 100},
}
_BRACES = re.compile(r"\{(.*?)\}(?:\.\.\.)?")
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_METAVARS: Mapping[Any, str] = {
    int: "N",
    float: "NUMBER",
    str: "TEXT",
    Path: "FILE",
    "fraction": "PERCENT",
    "numbers": "NUMBERS",
    "sizes": "NUMBERS",
    "auto": "N|auto",
}


def verb(
    name: str, options: str = "", /, **arguments: str
) -> Callable[[Callable[..., Report]], Verb]:
    """Turn a function into the verb `name`, with the options of a dataclass (`module:class`).

    `arguments` say what the function's own parameters are; it gets them and, by field, the options
    that were given.
    """

    def decorate(function: Callable[..., Report]) -> Verb:
        return Verb(name, function, options, arguments)

    return decorate


def _argument(name: str, help: str, kind: Any) -> inspect.Parameter:
    metavar, _, text = help.rpartition(" :: ")
    about = typer.Argument(metavar=metavar or name.upper(), help=text, show_default=False)
    may_miss = type(None) in get_args(kind)
    default = None if may_miss else inspect.Parameter.empty
    return inspect.Parameter(name, _KEYWORD, annotation=Annotated[kind, about], default=default)


def _option(declared: Declared) -> inspect.Parameter:
    kind: Any = str if declared.form else declared.kind
    default = False if kind is bool else declared.shown_default
    if declared.many and not declared.form:
        kind = list[kind]
    if default is None and not declared.required:
        kind = kind | None
    choices = declared.choices
    about = typer.Option(
        *([declared.short] if declared.short else []),
        f"--{declared.flag}",
        help=_with_bounds(declared),
        show_default=False,
        rich_help_panel=declared.panel or None,
        metavar=(
            None
            if kind is bool
            else declared.metavar or "|".join(choices) or _METAVARS[declared.form or declared.kind]
        ),
        autocompletion=(
            (lambda incomplete: [c for c in choices if c.startswith(incomplete)])
            if choices
            else None
        ),
    )
    empty = inspect.Parameter.empty
    return inspect.Parameter(
        declared.name,
        _KEYWORD,
        annotation=Annotated[kind, about],
        default=empty if declared.required else default,
    )


def _with_bounds(declared: Declared) -> str:
    """The help text, and the default and the bounds that a reader may want to know."""
    default, lo, hi = declared.shown_default, declared.lo, declared.hi
    shown = f"{default:g}" if isinstance(default, float) else default
    notes = [] if shown in (None, "") or isinstance(default, bool) else [f"default: {shown}"]
    if lo is not None and hi is not None and hi < 1e9:
        percent = declared.form == "fraction"
        notes.append(f"{100 * lo:g}% to {100 * hi:g}%" if percent else f"{lo:g} to {hi:,.15g}")
    elif lo is not None and lo > 1:
        notes.append(f"at least {lo:g}")
    return f"{declared.help} [{'; '.join(notes)}]" if notes else declared.help


def _is_given(context: typer.Context, name: str) -> bool:
    source: Any = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


class _Command(typer.core.TyperCommand):
    """A command whose help shows its options in their panels, and arguments without their Python
    types.
    """

    def parse_args(self, context: Any, args: list[str]) -> list[str]:
        """Take `--run-code=unsafe` as the two options that it stands for."""
        plain = [
            part
            for one in args
            for part in (
                ["--run-code", "--run-code-unsafe"] if one == "--run-code=unsafe" else [one]
            )
        ]
        return list(super().parse_args(context, plain))

    def collect_usage_pieces(self, context: Any) -> list[str]:
        """Arguments as they are written: `URL`, not `{URL}`."""
        return [_BRACES.sub(r"\1", piece) for piece in super().collect_usage_pieces(context)]

    def format_options(self, context: Any, formatter: Any) -> None:
        """Write the arguments, and the options of each panel; output and help come last."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(context):
            if record := parameter.get_help_record(context):
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                panel = getattr(parameter, "rich_help_panel", None) or kind
                if kind == "Arguments":
                    record = (record[0].partition(" <")[0], record[1])
                panels.setdefault(PANEL if "--help" in parameter.opts else panel, []).append(record)
        for panel, records in panels.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records)


class Group(typer.core.TyperGroup):
    """A group whose commands are built when they are asked for; its help shows whole sentences in
    the order of `verbs`.
    """

    verbs: Mapping[str, Verb | Any] = {}

    def list_commands(self, context: Any) -> list[str]:
        """The names of the verbs."""
        return list(self.verbs)

    def get_command(self, context: Any, name: str) -> Any:
        """The command called `name`, None where there is none."""
        known = self.verbs.get(name)
        return known.command() if isinstance(known, Verb) else known

    def format_commands(self, context: Any, formatter: Any) -> None:
        """Write the name of each verb and what it does."""
        with formatter.section("Commands"):
            formatter.write_dl(list(self.sentences().items()))

    def sentences(self) -> dict[str, str]:
        """Each verb's name and what it does."""
        shown = getattr(self.verbs, "shown", None)
        return shown() if shown else {name: sentence_of(verb) for name, verb in self.verbs.items()}


def sentence_of(verb: Any) -> str:
    """What a verb or a group of verbs does, in one sentence."""
    return verb.sentence if isinstance(verb, Verb) else str(verb.help)


def group_of(verbs: Mapping[str, Verb | Any]) -> type[Group]:
    """The class of a group that has these verbs."""
    return type("Verbs", (Group,), {"verbs": verbs})


def group(name: str, help: str, verbs: Mapping[str, Verb]) -> Group:
    """A verb of several commands."""
    app = typer.Typer(cls=group_of(verbs), name=name, help=help, no_args_is_help=True, **TYPER)
    app.callback()(lambda: None)
    built = typer.main.get_command(app)
    assert isinstance(built, Group)
    return built


# Run a verb and write its report.

_READER_GONE = frozenset({errno.EPIPE, errno.EIO})
"""A pipe whose reader ended (`assay … | head`), a terminal that was closed."""


def run(name: str, output: Output, body: Callable[[], Report]) -> int:
    """Run a verb, write its report everywhere it should go, and return the exit code."""
    with _stdout_kept_clean(output.json == STDOUT) as stdout:
        files: list[tuple[str, Path]] = []
        try:
            files = files_of(output)
            report = body()
        except AssayError as error:
            report = error_report(name, error)
        except KeyboardInterrupt:
            report = interrupted_report(name)
        except Exception as error:
            if isinstance(error, ImportError) and (
                missing := not_installed(f"assay {name}", error, f"{area_of(name)}.not_installed")
            ):
                report = error_report(name, missing)
            elif out_of_memory(error):
                report = error_report(name, _no_memory(error, area_of(name)))
            elif plugin := culprit(error.__traceback__):
                report = error_report(name, _failed(plugin, error, area_of(name)))
            else:
                return _bug(error, output.debug)
        with writing():
            return _finish(name, report, output, files, stdout)


def _finish(
    name: str, report: Report, output: Output, files: Sequence[tuple[str, Path]], stdout: TextIO
) -> int:
    """Complete a report, write it everywhere it should go, and return the exit code."""
    from assay.environment import recorded

    report = recorded(with_usage_of(name, settled(report)))
    if sign := received():
        report = replace(report, signal=int(sign))
    try:
        write(report, output, files, stdout)
    except OSError as error:
        if error.filename is None and error.errno in _READER_GONE:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader has gone
            return report.exit_code
        where = f": {error.filename}" if error.filename else ""
        print(f"assay: cannot write the report: {error.strerror}{where}", file=sys.stderr)
        return Verdict.ERROR.exit_code
    except Exception as error:
        if not (plugin := culprit(error.__traceback__)):
            return _bug(error, output.debug)
        print(f"assay: {_failed(plugin, error, area_of(name)).message}", file=sys.stderr)
        return Verdict.ERROR.exit_code
    return report.exit_code


def _bug(error: Exception, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    said = f"{type(error).__name__}: {_one_line(error)}"
    print(f"assay: bug: {said} (run again with --debug and report it)", file=sys.stderr)
    return EXIT_BUG


def _no_memory(error: Exception, area: str) -> AssayError:
    """The error for memory that ran out where nothing smaller could be tried."""
    return AssayError(
        f"out of memory: {_one_line(error) or 'the system gave no more'}",
        finding_id=f"{area}.out_of_memory",
        remedy="use fewer or shorter windows, a smaller model or type, or another device",
    )


def _failed(plugin: Plugin, error: Exception, area: str) -> AssayError:
    """The error for a plug-in that raised what only a bug raises."""
    return AssayError(
        f"the plug-in {plugin.name!r} ({plugin.group}) of {plugin.package} {plugin.version} failed:"
        f" {type(error).__name__}: {_one_line(error)}",
        finding_id=f"{area}.plugin",
        remedy="tell its authors, or uninstall it",
    )


def files_of(output: Output) -> list[tuple[str, Path]]:
    """Formats and files that were asked for; UsageError where one cannot be written: not at the end
    of a long run.
    """
    files = [
        (n, path)
        for n in ("html", "junit", "markdown", "prometheus")
        if (path := getattr(output, n))
    ]
    if output.json not in (None, STDOUT):
        files.append(("json", Path(output.json)))
    for text in output.report:
        name, _, file = text.partition("=")
        known = names("assay.reports")
        if not file or name not in known or get("assay.reports", name) is None:
            raise UsageError(
                f"--report {text!r} names no format and file",
                remedy=f"NAME=FILE with one of {', '.join(known)}",
            )
        files.append((name, Path(file)))
    for name, path in files:
        check_writable(name, path)
    return files


def check_writable(option: str, path: Path) -> None:
    """A report that cannot be written should not cost the minutes of a run first."""
    if path.is_dir():
        raise UsageError(f"--{option} {path} is a directory", remedy="name a file in it")
    if not path.parent.is_dir():
        raise UsageError(f"--{option} {path}: its folder does not exist", remedy="make it first")


def write(
    report: Report, output: Output, files: Sequence[tuple[str, Path]], stdout: TextIO
) -> None:
    """Write `report` to `stdout` (JSON or for people) and to the files that were asked for."""
    for name, path in files:
        render = _json_text if name == "json" else get("assay.reports", name)
        path.write_text(render(report), encoding="utf-8")
    if output.json == STDOUT:
        stdout.write(_json_text(report))
    else:
        from assay.report import console

        console.print_report(report, file=stdout, verbose=output.verbose)
    stdout.flush()


def _json_text(report: Report) -> str:
    return json.dumps(report.to_json(), ensure_ascii=False, indent=2, allow_nan=False) + "\n"


def error_report(name: str, error: AssayError) -> Report:
    """The report of a subject that could not be examined."""
    return Report(command=name, verdict=error.verdict, findings=(error.to_finding(),))


def with_usage_of(name: str, report: Report) -> Report:
    """`report` with every wrong use in the area of its verb: what reads a spec does not know which
    verb was asked.
    """
    usage = f"{area_of(name)}.usage"
    return replace(
        report,
        findings=tuple(
            replace(f, id=usage) if f.id.endswith(".usage") else f for f in report.findings
        ),
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
        title=(
            "interrupted again while the report was made; what was measured is kept"
            if asked_again()
            else "interrupted before there was anything to show"
        ),
    )
    return Report(command=name, verdict=Verdict.INCONCLUSIVE, findings=(finding,), interrupted=True)


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


@contextlib.contextmanager
def _stdout_kept_clean(wanted: bool) -> Iterator[TextIO]:
    """Yield the real stdout. With `--json` all else that would be printed there, even by a child,
    goes to stderr.
    """
    if not wanted:
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
