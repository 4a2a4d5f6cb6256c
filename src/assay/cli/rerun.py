"""`assay rerun RESULT`: repeat the comparison that a result came from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from assay.cli.verb import verb
from assay.verdict import Report


@verb("rerun")
def command(
    result: Annotated[Path, typer.Argument(help="JSON that `assay compare --json` wrote.")],
    allow_marginal: Annotated[bool, typer.Option("--allow-marginal", help="MARGINAL passes.")] = False,
) -> Report:
    """Run the comparison of an earlier result again, from the plan that it echoes.

    Exit codes as those of compare.
    """
    from assay.cli.progress import say, show
    from assay.errors import UsageError
    from assay.fidelity.compare import run_compare
    from assay.fidelity.plan import plan_from

    try:
        plan = json.loads(result.read_text(encoding="utf-8"))["subject"]["plan"]
        if not isinstance(plan, dict):
            raise TypeError
    except OSError as error:
        raise UsageError(
            f"cannot read {result}: {error.strerror}", remedy="check the path", finding_id="fidelity.usage"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{result} is no result of assay compare: it holds no plan",
            remedy="give the JSON that assay compare --json wrote",
            finding_id="fidelity.usage",
        ) from error
    return run_compare(plan_from(plan, {}, where=str(result)), show, say=say, allow_marginal=allow_marginal)
