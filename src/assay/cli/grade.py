"""`assay grade`: is a finished text sane?"""

from __future__ import annotations

from typing import Annotated

import typer

from assay.cli.verb import verb
from assay.verdict import Report


def grade_command(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Model outputs; `-` reads stdin.")],
) -> Report:
    """Label finished model outputs: ok, degenerate, empty or truncated_reasoning.

    A file holds raw text, or one chat-completion response as JSON. Exit code 1 if any text is degenerate or
    empty, 3 if the worst is truncated reasoning, 2 if a file cannot be read.
    """
    from assay.coherence.grade_files import grade_files

    return grade_files(files)


command = verb("grade")(grade_command)
