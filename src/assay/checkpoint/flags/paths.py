"""Files and folders that a command line names: they must exist, and fit the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from assay.checkpoint.findings import found
from assay.checkpoint.flags.command import ServeArgs
from assay.checkpoint.opening import open_checkpoint
from assay.checkpoint.rules.chat_template import template_problem
from assay.checkpoint.rules.tokenizer import embedding_rows, read_vocabulary
from assay.checkpoint.subject import Checkpoint
from assay.errors import AssayError
from assay.files import read_bounded
from assay.verdict import Finding

_WRITTEN_OUT = "{}\n"
"""A template with one of these characters is the template itself."""
_BUILT_IN = frozenset(
    {"template_basic.jinja", "template_blip2.jinja", "template_chatml.jinja"}
    | {"template_deepseek_ocr.jinja", "template_deepseek_vl2.jinja"}
    | {"template_kimi_audio.jinja"}
    | {"template_minicpmv45.jinja"}
)
"""Templates that vLLM brings along."""
MOST_TEMPLATE_BYTES = 1 << 20
SAME_SHARE = 0.99
"""Two tokenizers with a smaller share of equal ids are not of one model."""


def lint_paths(checkpoint: Checkpoint, args: ServeArgs) -> Iterator[Finding]:
    """Findings on the template, the tokenizer and the draft that a command names."""
    yield from _template(args.get("--chat-template"))
    yield from _tokenizer(checkpoint, args)
    yield from _named_files(args)
    settings = args.structure("--speculative-config") or {}
    draft = settings.get("model")
    if isinstance(draft, str) and looks_local(draft) and not Path(draft).expanduser().is_dir():
        title = f"--speculative-config names the draft {draft}, and no such folder exists"
        remedies = ["download the draft first, or name it as ORG/NAME"]
        yield found(
            "flag_rejected", title, remedies=remedies, flag="--speculative-config", value=draft
        )


def _named_files(args: ServeArgs) -> Iterator[Finding]:
    """Files that the engine opens at start, and adapters, which are written as NAME=PATH."""
    name = args.get("--log-config-file")
    if name and not Path(name).expanduser().is_file():
        title = f"--log-config-file {name}: no such file exists"
        yield found("flag_rejected", title, flag="--log-config-file", value=name)
    adapter = args.get("--lora-modules")
    if adapter and "=" not in adapter and not adapter.startswith("{"):
        title = f"--lora-modules {adapter} is not NAME=PATH, and no JSON object"
        yield found("flag_rejected", title, flag="--lora-modules", value=adapter)


def looks_local(name: str) -> bool:
    """Whether a model is named by a path; `ORG/NAME` and `NAME` are repositories."""
    return name.startswith(("/", "./", "../", "~")) or name.count("/") > 1


def _template(text: str | None) -> Iterator[Finding]:
    if text is None:
        return
    if any(character in text for character in _WRITTEN_OUT):
        problem = template_problem(text)
        where = "written on the command line"
    elif text in _BUILT_IN:
        return
    else:
        try:
            read = read_bounded(text, MOST_TEMPLATE_BYTES, what="the chat template")
        except AssayError as error:
            title = f"--chat-template {text} cannot be read: {str(error).partition(': ')[2]}"
            yield found("flag_rejected", title, flag="--chat-template", value=text)
            return
        problem, where = template_problem(read.decode("utf-8", "replace")), text
    if problem:
        title = f"--chat-template: the template {where} {problem}"
        yield found("chat_template_invalid", title, flag="--chat-template")


def _tokenizer(checkpoint: Checkpoint, args: ServeArgs) -> Iterator[Finding]:
    """A tokenizer of another model gives ids that this model has learned otherwise, or has not."""
    name = args.get("--tokenizer")
    if name is None or name == args.model:
        return
    folder = Path(name).expanduser()
    if not folder.is_dir():
        if looks_local(name):
            title = f"--tokenizer {name}: no such folder exists"
            yield found("flag_rejected", title, flag="--tokenizer", value=name)
        return
    try:
        document = open_checkpoint(str(folder)).checkpoint.object("tokenizer.json")
    except AssayError as error:
        title = f"--tokenizer {name} cannot be read: {error}"
        yield found("flag_rejected", title, flag="--tokenizer", value=name)
        return
    given = read_vocabulary(document)
    own = read_vocabulary(checkpoint.object("tokenizer.json"))
    rows = embedding_rows(checkpoint)
    if given is None:
        return
    if rows and given.highest >= rows:
        title = f"--tokenizer {name} has ids up to {given.highest}, the embedding {rows} rows"
        yield found("tokenizer_conflict", title, flag="--tokenizer", rows=rows)
    elif own is not None and own.ids:
        same = sum(given.ids.get(token) == i for token, i in own.ids.items())
        if same < SAME_SHARE * len(own.ids):
            title = f"--tokenizer {name} gives {len(own.ids) - same} of {len(own.ids)} tokens"
            title += " another id than the checkpoint's own: it is another model's"
            yield found("tokenizer_conflict", title, flag="--tokenizer", equal=same)
