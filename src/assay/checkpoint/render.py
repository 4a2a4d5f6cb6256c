"""Render chat templates in a process of their own, with bounds: a template is a program from
outside.

`python render.py` reads `{template, special}` as JSON and prints `{texts}`: the conversation that
ends with the assistant's answer, and the one that goes on. It limits its own processor time and
memory first.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.parser import Parser

CPU_S, WALL_S, MEMORY, MAX_CHARACTERS = 2, 30, 1 << 30, 1 << 18
BOUNDS_REACHED = 3
"""Exit code of a rendering that took too long or too much."""
ANSWER = "ASSAYANSWER"
"""What the assistant says in the conversations."""


class Runaway(Exception):
    """The template did not come to an end within the bounds."""


class Generation(Extension):
    """`{% generation %} … {% endgeneration %}` marks the assistant's part."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements inside, as if the mark were not there."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def environment() -> jinja2.Environment:
    """Jinja as transformers sets it up."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[loopcontrols, Generation],
        autoescape=False,
    )
    made.filters["tojson"] = lambda value, **rest: json.dumps(value, ensure_ascii=False)
    made.globals |= {"raise_exception": _refuse, "strftime_now": lambda form: "2026-01-01"}
    return made


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


@lru_cache(maxsize=64)
def render(template: str, special: tuple[tuple[str, str], ...]) -> tuple[str, ...]:
    """The two conversations as text, none if the template refuses them. Raises Runaway."""
    given = json.dumps({"template": template, "special": dict(special)})
    try:
        done = subprocess.run(
            [sys.executable, "-P", __file__],
            input=given.encode(),
            capture_output=True,
            timeout=WALL_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise Runaway from error
    except OSError:
        return ()
    if (
        done.returncode == BOUNDS_REACHED or done.returncode < 0
    ):  # a signal: the system enforced the bounds
        raise Runaway
    return tuple(json.loads(done.stdout)["texts"]) if done.returncode == 0 else ()


def _texts(template: str, special: dict[str, str]) -> list[str]:
    asked, answered = (
        {"role": "user", "content": "ASSAYQUESTION"},
        {"role": "assistant", "content": ANSWER},
    )
    texts = []
    for messages in ([asked, answered], [asked, answered, asked]):
        pieces: list[str] = []
        size = 0
        for piece in (
            environment()
            .from_string(template)
            .generate(messages=messages, add_generation_prompt=False, **special)
        ):
            size += len(piece)
            if size > MAX_CHARACTERS:
                raise Runaway
            pieces.append(piece)
        texts.append("".join(pieces))
    return texts


def main() -> None:
    """Render what stands on standard input."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    given: dict[str, Any] = json.load(sys.stdin)
    try:
        texts = _texts(given["template"], given["special"])
    except (Runaway, MemoryError):
        sys.exit(BOUNDS_REACHED)
    except (
        Exception
    ):  # what a template may raise is its author's choice; it says nothing about the end of a turn
        texts = []
    print(json.dumps({"texts": texts}))


if __name__ == "__main__":
    main()
