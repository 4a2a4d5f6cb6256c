"""`assay`: the command line. The verbs are in `verbs`; this file lists them and runs one."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import typer

from assay.cli import verbs
from assay.cli.verb import (
    STDOUT,
    TYPER,
    Group,
    Output,
    Verb,
    area_of,
    group,
    group_of,
    run,
    sentence_of,
    usage_report,
)
from assay.errors import AssayError
from assay.plugins import get, names
from assay.signals import exit_code, finish, listen
from assay.verdict import EXITS_INTERRUPTED, SCHEMA, Verdict

# Newer releases of typer carry their own copy of click; the base class of their errors is reached
# through typer.
_ClickException: type[Exception] = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)

# In the order in which a user meets them.
OWN: Mapping[str, Verb | Any] = {
    "check": verbs.check,
    "watch": verbs.watch,
    "doctor": verbs.doctor,
    "bundle": group(
        "bundle", verbs.BUNDLE_HELP, {"show": verbs.bundle_show, "verify": verbs.bundle_verify}
    ),
    "grade": verbs.grade,
    "verify": verbs.verify,
    "spec": verbs.spec,
    "compare": verbs.compare,
    "reference": verbs.reference,
    "reference pack": verbs.reference_pack,
    "rerun": verbs.rerun,
    "gate": verbs.gate,
    "card": verbs.card,
    "table": verbs.table,
    "diff": verbs.diff,
    "demo": verbs.demo,
}

LAB: Mapping[str, str] = {
    "kv": (
        "KV-cache codecs: evaluate, sweep, calibrate, diagnose, attribute, allocate, serve, encode,"
        " decode."
    ),
    "gap": "Take the difference of two deployments apart into buckets that sum.",
    "heads": "Draft heads: train one for a target, measure it beside changed targets.",
}
"""Verbs that the laboratory brings; `assay lab heads` is `assay heads`."""
LAB_INSTALL = "pip install 'llm-assay[lab]'"


class Verbs(Mapping[str, Any]):
    """Every verb by name: assay's own, then those of the group `assay.verbs`, looked for when they
    are asked for.
    """

    def __getitem__(self, name: str) -> Verb | Any:
        if name in OWN:
            return OWN[name]
        if (found := get("assay.verbs", name)) is None:
            raise KeyError(name)
        return found

    def __iter__(self) -> Iterator[str]:
        *own, last = OWN  # the demo shows the others
        found = names("assay.verbs")
        known = (name for name in LAB if name in found)
        return iter(dict.fromkeys((*own, *known, *sorted(found), last)))

    def __len__(self) -> int:
        return sum(1 for _ in self)  # `list` would ask for the length

    def shown(self) -> dict[str, str]:
        """The name and the sentence of each verb, those that are not installed included."""
        found = {name: sentence_of(verb) for name in self if (verb := self.get(name)) is not None}
        return found | {
            name: f"{text} ({LAB_INSTALL})" for name, text in LAB.items() if name not in found
        }


VERBS = Verbs()


def _commands_of(name: str) -> Mapping[str, Any]:
    """The commands of a verb that is a group, empty for any other."""
    found = VERBS.get(name)
    return found.verbs if isinstance(found, Group) else {}


def build() -> Any:
    """The command `assay` of typer, with every verb."""
    app = typer.Typer(
        cls=group_of(VERBS),
        name="assay",
        help="Prove that a fast LLM is still the same model.",
        no_args_is_help=True,
        **{**TYPER, "add_completion": True},
    )
    app.callback()(_root)
    return typer.main.get_command(app)


def _show_version(wanted: bool) -> None:
    if wanted:
        from assay.environment import VERSION

        print(f"assay {VERSION}")
        raise typer.Exit


def _root(
    version: bool = typer.Option(
        False, "--version", is_eager=True, callback=_show_version, help="Show the version."
    ),
) -> None:
    """Options of `assay` itself; each acts in its own callback."""


def main(arguments: list[str] | None = None) -> None:
    """Entry point of the `assay` command."""
    listen()
    _open_missing_streams()
    # Torch's threads, once imported, would otherwise spin while they wait: beside another program
    # that takes the same cores, a step of a second then takes a minute.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    code = invoke(sys.argv[1:] if arguments is None else arguments)
    finish()
    waits = any(
        t.name.startswith("ThreadPoolExecutor") and t.is_alive() for t in threading.enumerate()
    )
    if code in EXITS_INTERRUPTED or waits:
        # Threads may still wait for answers that are not read any more, after an interrupt or the
        # end of a budget; a normal exit would wait with them.
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
    sys.exit(code)


def _open_missing_streams() -> None:
    """Python has None for a standard stream that is closed (`>&-`); nothing is read from it,
    nothing kept.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode, encoding="utf-8"))  # noqa: SIM115


READ_JSON = ("grade", "spec", "rerun", "card", "table")
"""Verbs whose own arguments may be JSON files."""


def invoke(arguments: list[str]) -> int:
    """Run one command line and return its exit code. A wrong one is a report too, so `--json` stays
    JSON.
    """
    if arguments[:1] == ["lab"] and arguments[1:2] and arguments[1] in LAB:
        arguments = arguments[1:]
    if arguments and arguments[0] in LAB and arguments[0] not in VERBS:
        return _not_installed(arguments)
    command = build()
    arguments = _json_in_one_word(arguments)
    if " ".join(arguments[:2]) in VERBS:  # a command of two words is one name
        arguments = [" ".join(arguments[:2]), *arguments[2:]]
    try:
        result = command.main(args=arguments, prog_name="assay", standalone_mode=False)
    except (typer.Abort, KeyboardInterrupt):
        return exit_code()
    except _ClickException as error:
        if not arguments or (
            len(arguments) == 1 and _commands_of(arguments[0])
        ):  # the "error" is the help text
            print(_message(error))
            return Verdict.ERROR.exit_code
        report = usage_report(_verb_of(arguments), _message(error) + _nearest(arguments, error))
        json = next((a.partition("=")[2] for a in arguments if a.startswith("--json=")), None)
        return run(report.command, Output(json=json), lambda: report)
    return result if isinstance(result, int) else 0


def _not_installed(arguments: list[str]) -> int:
    """Say where a verb of the laboratory comes from."""
    name, *rest = arguments
    if "--help" in rest or "-h" in rest:
        print(f"assay {name}: {LAB[name]}\n\nThe laboratory is not installed: {LAB_INSTALL}")
        return 0
    json = next(
        (a.partition("=")[2] for a in _json_in_one_word(arguments) if a.startswith("--json=")), None
    )

    def refuse() -> Any:
        raise AssayError(
            f"assay {name} is a verb of the laboratory, which is not installed",
            finding_id=f"{area_of(name)}.not_installed",
            remedy=LAB_INSTALL,
        )

    return run(name, Output(json=json), refuse)


def _json_in_one_word(arguments: list[str]) -> list[str]:
    """`--json` with the file to write after it, where the next word is one, else with `-` for
    standard output; so `--ray`.
    """
    found: list[str] = []
    words = iter(range(len(arguments)))
    for i in words:
        word, after = arguments[i], arguments[i + 1 : i + 2]
        if word == "--":
            return found + arguments[i:]
        if word == "--ray":
            from assay.options import is_address

            address = after[0] if after and is_address(after[0]) else ""
            word = f"--ray={address or 'local'}"
            if address:
                next(words)
        elif word == "--json":
            names_file = bool(after) and _is_written(after[0], arguments[:i])
            word = f"--json={after[0] if names_file else STDOUT}"
            if names_file:
                next(words)
        found.append(word)
    return found


def _is_written(word: str, before: list[str]) -> bool:
    """Whether the word after `--json` is a file to write. A verb that reads JSON files needs
    something else to read, and none of them is overwritten but the result of an earlier run."""
    if not word.endswith(".json") or not before or before[0] not in READ_JSON:
        return word.endswith(".json")
    if not any(not other.startswith("-") for other in before[1:]):
        return False
    try:
        with Path(word).open(encoding="utf-8", errors="replace") as file:
            return f'"schema": "{SCHEMA}"' in file.read(40)
    except OSError:
        return True


def _verb_of(arguments: list[str]) -> str:
    """The verb of a wrong command line, `kv eval` where it is one of a group; `assay` where there
    is none.
    """
    words = [a for a in arguments if not a.startswith("-")]
    if words and (commands := _commands_of(words[0])):
        return " ".join(words[: 2 if words[1:2] and words[1] in commands else 1])
    return words[0] if words and words[0] in VERBS else "assay"


def _message(error: Exception) -> str:
    said = str(getattr(error, "format_message", error.__str__)())
    return re.sub(
        r"Input should be a valid (integer|number),.*", lambda found: _NOT_A[found[1]], said
    )


_NOT_A = {"integer": "not a whole number", "number": "not a number"}
"""What the parser's message says in plain words."""


def _nearest(arguments: list[str], error: Exception) -> str:
    """The verb that a mistyped one was meant to be, as a clause."""
    wanted = re.match(r"No such command '(.+)'", _message(error))
    known = _commands_of(arguments[0]) or VERBS.shown()
    near = get_close_matches(wanted[1], known, n=1) if wanted else []
    return f" The nearest is {near[0]!r}." if near else ""


if __name__ == "__main__":
    main()
