"""The chat template: present, parseable, about the messages, and a program that ends."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from assay.checkpoint.draft import is_draft
from assay.checkpoint.findings import found, warned
from assay.checkpoint.rules.tokenizer import token_text
from assay.checkpoint.subject import Checkpoint
from assay.verdict import Finding

MAX_CHARACTERS = 400_000

_FILE = "chat_template.jinja"

MAX_TEMPLATES = 16

Special = tuple[tuple[str, str], ...]


def templates(checkpoint: Checkpoint) -> dict[str, Any]:
    """Templates by where they stand: the file of its own, chat_template.json,
    tokenizer_config.json.
    """
    places: dict[str, Any] = {}
    if _FILE in checkpoint.files:
        places[_FILE] = checkpoint.text(_FILE)
    for name in ("chat_template.json", "tokenizer_config.json"):
        value = checkpoint.object(name).get("chat_template")
        if isinstance(value, list):
            for entry in value[:MAX_TEMPLATES]:
                named = entry if isinstance(entry, dict) else {}
                places[f"{name}: {str(named.get('name', 'unnamed'))[:40]}"] = named.get("template")
        elif value is not None:
            places[name] = value
    return places


def check_chat_template(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Findings on every template of the checkpoint."""
    places = templates(checkpoint)
    readers = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
    if not places and any(n in checkpoint.files for n in readers) and not is_draft(checkpoint):
        title = "no chat template: fine for a base model; a chat server needs --chat-template"
        yield warned("chat_template_invalid", title)
    special = special_tokens(checkpoint)
    for where, text in places.items():
        if problem := template_problem(text, special):
            remedies = ["take the template from the original repository"]
            title = f"the chat template in {where} {problem}"
            yield found("chat_template_invalid", title, remedies=remedies, path=where)
    if _FILE in places and places.get("tokenizer_config.json") not in {None, places[_FILE]}:
        title = f"{_FILE} and tokenizer_config.json hold different chat templates"
        detail = "Newer libraries read the file, older ones the config."
        yield warned("chat_template_invalid", title, detail=detail)


def special_tokens(checkpoint: Checkpoint) -> Special:
    """(name, text) of the tokens that templates use by name."""
    settings = checkpoint.object("tokenizer_config.json")
    named = (
        (key, token_text(settings.get(key)))
        for key in ("bos_token", "eos_token", "pad_token", "unk_token")
    )
    return tuple((key, text) for key, text in named if text)


def template_problem(text: Any, special: Special = ()) -> str | None:
    """What is wrong with a template, as the end of a sentence, or None."""
    import jinja2
    from jinja2 import nodes

    import assay.checkpoint.render as render

    if not isinstance(text, str):
        return "is not text"
    if not text.strip():
        return "is empty"
    if len(text) > MAX_CHARACTERS:
        return f"is {len(text)} characters long"
    try:
        # Only parsed here: looking for undeclared variables would compute constants, such as
        # 9**9**9.
        names = {node.name for node in render.environment().parse(text).find_all(nodes.Name)}
    except jinja2.TemplateSyntaxError as error:
        return f"does not parse: {error.message} (line {error.lineno})"
    except RecursionError:
        return "is nested too deeply"
    if "messages" not in names:
        return "never uses the messages"
    try:
        render.render(text, special)
    except render.Runaway:
        return (
            f"does not finish two messages within {render.CPU_S} s, {render.MEMORY >> 30} GiB and"
            f" {render.MAX_CHARACTERS} characters"
        )
    return None


def turn_end(text: Any, special: Special, added: Collection[str]) -> tuple[str, ...]:
    """The tokens that a template writes right after an answer; none if it writes none or cannot be
    rendered.
    """
    import assay.checkpoint.render as render

    if template_problem(text, special):
        return ()
    ends: list[str] = []
    for at, rendered in enumerate(render.render(text, special)):
        rest = rendered.partition(render.ANSWER)[2].lstrip()
        while tokens := [t for t in added if t and rest.startswith(t)]:
            ends.append(max(tokens, key=len))
            rest = rest.removeprefix(ends[-1]).lstrip()
            if at:  # what follows the first token belongs to the next turn
                break
        if not ends:  # the answer is the end; what follows it elsewhere begins the next turn
            return ()
    return tuple(dict.fromkeys(ends))
