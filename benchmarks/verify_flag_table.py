"""Make the table of `vllm serve`'s options from vLLM's own argument parser.

Run it with the Python of an environment that holds vLLM; it needs neither a GPU nor assay:

    PYTHON_OF_VLLM benchmarks/verify_flag_table.py > src/assay/checkpoint/flags/vllm_0_32_0.json

The table gives, by option: what it takes (`switch`, `value`, `optional`, `many`), the type of its
value, its choices, and the bounds that vLLM's configuration classes set. `names` holds the names
that vLLM looks up in registries: parsers, load formats, tokenizer modes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import json
import sys
from argparse import Action
from typing import Any

KINDS = {0: "switch", None: "value", 1: "value", "?": "optional", "+": "many", "*": "many"}
TYPES = {
    "int": "int", "float": "float", "human_readable_int": "size", "loads": "json",
    "human_readable_int_or_auto": "size or auto", "parse_dataclass": "json",
    "union_dict_and_str": "text or json",
}  # fmt: skip
BOUNDS = ("ge", "gt", "le", "lt")


def type_of(action: Action) -> str:
    """The type of an option's value, `text` for all that is not a number or JSON."""
    made: Any = action.type
    for cell in getattr(made, "__closure__", None) or ():
        inner = cell.cell_contents
        if callable(inner) and getattr(inner, "__name__", "") in TYPES:
            made = inner
    return TYPES.get(getattr(made, "__name__", ""), "text")


def bounds() -> dict[str, dict[str, float]]:
    """Bounds of every field of vLLM's configuration classes, by the option's name."""
    config = importlib.import_module("vllm.config")
    found: dict[str, dict[str, float]] = {}
    for name in dir(config):
        made = getattr(config, name)
        if not (isinstance(made, type) and dataclasses.is_dataclass(made)):
            continue
        for key, field in getattr(made, "__pydantic_fields__", {}).items():
            limits = {
                bound: value
                for rule in field.metadata
                for bound in BOUNDS
                if (value := getattr(rule, bound, None)) is not None
            }
            if limits:
                found.setdefault("--" + key.replace("_", "-"), limits)
    return found


def names() -> dict[str, list[str]]:
    """What vLLM looks up in registries."""
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER
    from vllm.reasoning import ReasoningParserManager
    from vllm.tokenizers.registry import TokenizerRegistry
    from vllm.tool_parsers import ToolParserManager

    return {
        "--tool-call-parser": sorted(
            {*ToolParserManager.tool_parsers, *ToolParserManager.lazy_parsers}
        ),
        "--reasoning-parser": ReasoningParserManager.list_registered(),
        "--load-format": sorted(_LOAD_FORMAT_TO_MODEL_LOADER),
        "--tokenizer-mode": sorted({"auto", *TokenizerRegistry.tokenizers}),
    }


def table() -> dict[str, Any]:
    """The whole table."""
    import vllm
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    limits = bounds()
    options: dict[str, Any] = {}
    for action in make_arg_parser(FlexibleArgumentParser())._actions:
        for option in action.option_strings:
            row: dict[str, Any] = {"takes": KINDS.get(action.nargs, "many")}
            if row["takes"] != "switch" and (kind := type_of(action)) != "text":
                row["type"] = kind
            if action.choices:
                row["choices"] = [str(c) for c in action.choices]
            if action.option_strings[0] in limits and row["takes"] != "switch":
                row |= limits[action.option_strings[0]]
            options[option] = row
    return {"engine": "vllm", "version": vllm.__version__, "options": options, "names": names()}


def main() -> None:
    """Print the table, one option a line."""
    with contextlib.redirect_stdout(io.StringIO()):
        made = table()
    rows = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(made["options"].items())]
    named = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(made["names"].items())]
    sys.stdout.write(
        f'{{"engine": "vllm", "version": "{made["version"]}",\n"options": {{\n'
        + ",\n".join(rows) + '\n},\n"names": {\n' + ",\n".join(named) + "\n}}\n"
    )  # fmt: skip


if __name__ == "__main__":
    main()
