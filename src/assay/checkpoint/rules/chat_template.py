"""The chat template: present, parseable, and about the messages. It is parsed, never run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from assay.checkpoint.findings import found, warned
from assay.checkpoint.subject import Checkpoint
from assay.verdict import Finding

if TYPE_CHECKING:
    import jinja2
    from jinja2 import nodes
    from jinja2.parser import Parser

MAX_CHARACTERS = 2_000_000
_FILE = "chat_template.jinja"


def templates(checkpoint: Checkpoint) -> dict[str, Any]:
    """Templates by where they stand: the file of its own, chat_template.json, tokenizer_config.json."""
    places: dict[str, Any] = {}
    if _FILE in checkpoint.files:
        places[_FILE] = checkpoint.text(_FILE)
    for name in ("chat_template.json", "tokenizer_config.json"):
        value = checkpoint.object(name).get("chat_template")
        if isinstance(value, list):
            for entry in value:
                if isinstance(entry, dict):
                    places[f"{name}: {entry.get('name', 'unnamed')}"] = entry.get("template")
        elif value is not None:
            places[name] = value
    return places


def check_chat_template(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Findings on every template of the checkpoint."""
    places = templates(checkpoint)
    if not places:
        if any(n in checkpoint.files for n in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
            title = "no chat template: fine for a base model; a chat server needs --chat-template"
            yield warned("chat_template_invalid", title)
        return
    for where, text in places.items():
        problem = template_problem(text)
        if problem is not None:
            remedies = ["take the template from the original repository"]
            yield found(
                "chat_template_invalid",
                f"the chat template in {where} {problem}",
                remedies=remedies,
                path=where,
            )
    if _FILE in places and places.get("tokenizer_config.json") not in {None, places[_FILE]}:
        title = f"{_FILE} and tokenizer_config.json hold different chat templates"
        detail = "Newer libraries read the file, older ones the config."
        yield warned("chat_template_invalid", title, detail=detail)


def template_problem(text: Any) -> str | None:
    """What is wrong with a template, as the end of a sentence, or None."""
    import jinja2
    from jinja2 import meta

    if not isinstance(text, str):
        return "is not text"
    if not text.strip():
        return "is empty"
    if len(text) > MAX_CHARACTERS:
        return f"is {len(text)} characters long"
    try:
        names = meta.find_undeclared_variables(_environment().parse(text))
    except jinja2.TemplateSyntaxError as error:
        return f"does not parse: {error.message} (line {error.lineno})"
    except RecursionError:
        return "is nested too deeply"
    if "messages" not in names:
        return "never uses the messages"
    return None


def _environment() -> jinja2.Environment:
    """Jinja as transformers sets it up, with its `{% generation %}` block."""
    import jinja2
    from jinja2.ext import Extension, loopcontrols

    class Generation(Extension):
        """`{% generation %} … {% endgeneration %}` marks the assistant's part."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    return jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation], autoescape=False
    )
