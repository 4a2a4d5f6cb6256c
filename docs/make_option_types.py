"""Write src/assay/option_types.py: what the keyword arguments of each function of `assay` may be.

    python docs/make_option_types.py

The options are declared once, as fields of the verbs' dataclasses. A type checker cannot read
those, so this writes them down as `TypedDict`s; a test fails where the file is not as this writes
it.
"""

from __future__ import annotations

import textwrap
from importlib import import_module
from keyword import iskeyword
from pathlib import Path

from assay.options import Declared, declared_options

OUT = Path(__file__).parents[1] / "src" / "assay" / "option_types.py"
VERBS = {
    "Check": ("assay.coherence.options:CheckOptions", ()),
    "Watch": ("assay.monitor.options:WatchOptions", ()),
    "Verify": ("assay.checkpoint.options:VerifyOptions", ()),
    "Doctor": ("assay.options:DoctorOptions", ()),
    "Spec": ("assay.speculation.options:SpecOptions", ()),
    "Compare": ("assay.fidelity.plan:Plan", ("reference", "candidates")),
    "Rerun": ("assay.fidelity.plan:RerunOptions", ()),
    "Reference": ("assay.fidelity.plan:ReferenceOptions", ("engine", "out")),
    "Pack": ("assay.fidelity.pack.writer:PackOptions", ("source",)),
    "Gate": ("assay.gates.gate:GateOptions", ("contract",)),
    "Card": ("assay.gates.card:CardOptions", ()),
    "Table": ("assay.fidelity.table.sums:TableOptions", ("rows",)),
}
"""The dataclass of each function's options, and the fields that are arguments of their own."""
HEAD = '''"""The keyword arguments of the functions of `assay`, for type checkers and editors.

Written by docs/make_option_types.py from the dataclasses that declare the options.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import TypedDict
'''
FORMS = {
    "fraction": "float | str",
    "numbers": "str | Sequence[int]",
    "sizes": "str | Sequence[float]",
    "auto": "int | str",
}


def kind_of(option: Declared) -> str:
    """The type of an option's values, as Python writes it."""
    if option.form:
        kind = FORMS[option.form]
    else:
        name = option.kind.__name__
        kind = {"Path": "str | PathLike[str]"}.get(name, name)
        if option.many:
            one = "str" if name == "Path" else kind
            kind = f"{kind} | Sequence[{'str | PathLike[str]' if name == 'Path' else one}]"
    return f"{kind} | None" if option.optional else kind


def render() -> str:
    """The text of the file."""
    parts = [HEAD]
    for name, (home, apart) in VERBS.items():
        module, _, attribute = home.partition(":")
        options = declared_options(getattr(import_module(module), attribute))
        lines = [
            f"class {name}Args(TypedDict, total=False):",
            f'    """Options of {home.partition(":")[2]}."""',
            "",
        ]
        for option in options.values():
            if option.name in apart or option.name == "_" or not (option.listed or option.required):
                continue
            flag = option.flag.replace("-", "_")
            lines.append(f"    {option.name if iskeyword(flag) else flag}: {kind_of(option)}")
            text = option.help.replace("\\", "\\\\").replace('"', "'")
            lines += textwrap.wrap(
                f'"""{text}', 96, initial_indent="    ", subsequent_indent="    "
            )
            closes = len(lines[-1]) + 3 <= 100 and lines[-1].startswith('    """')
            lines[-1:] = [lines[-1] + '"""'] if closes else [lines[-1], '    """']
        parts.append("\n".join(lines) + "\n")
    return "\n\n".join(parts)


if __name__ == "__main__":
    OUT.write_text(render(), encoding="utf-8")
