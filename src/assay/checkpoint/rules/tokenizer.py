"""The tokenizer against itself, against its config and against the embedding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from assay.checkpoint.findings import SHOWN, found, plural, some, warned
from assay.checkpoint.subject import BrokenDocument, Checkpoint
from assay.verdict import Finding

if TYPE_CHECKING:
    import jinja2
    from jinja2 import nodes
    from jinja2.parser import Parser


# -----------------------------------------------------------------------------
# The vocabulary of a tokenizer.json: tokens, ids, and what is wrong with them.

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "spiece.model", "sentencepiece.bpe.model",
    "vocab.txt", "tokenizer.tiktoken", "qwen.tiktoken",
)  # fmt: skip


@dataclass(frozen=True)
class Vocabulary:
    """Token ids by text: the model's own and the added ones. `repeated` counts ids that two tokens share."""

    ids: dict[str, int]
    added: dict[str, int]
    repeated: int

    @property
    def highest(self) -> int:
        """The highest id (-1 for an empty vocabulary)."""
        return max((*self.ids.values(), *self.added.values()), default=-1)

    def id_of(self, token: str) -> int | None:
        """Id of a token, added or not."""
        return self.added.get(token, self.ids.get(token))


def read_vocabulary(document: dict[str, Any]) -> Vocabulary | str:
    """The vocabulary, or one line saying why there is none that can be read."""
    model = document.get("model")
    if not isinstance(model, dict):
        return "it has no model"
    raw = model.get("vocab")
    if isinstance(raw, dict):
        ids = raw
    elif isinstance(raw, list):  # Unigram: [token, score] by id
        ids = {str(row[0]): i for i, row in enumerate(raw) if isinstance(row, list) and row}
    else:
        return "its model has no vocabulary"
    if not all(type(v) is int and v >= 0 for v in ids.values()):
        return "its vocabulary has ids that are not natural numbers"
    added = {}
    for entry in document.get("added_tokens") or ():
        if (
            not isinstance(entry, dict)
            or type(entry.get("id")) is not int
            or not isinstance(entry.get("content"), str)
        ):
            return "an added token has no id or no content"
        added[entry["content"]] = entry["id"]
    return Vocabulary(ids, added, len(ids) - len(set(ids.values())))


def embedding_rows(checkpoint: Checkpoint) -> int | None:
    """Rows of the embedding as stored, else as configured."""
    tensor = checkpoint.tensors.get(f"{checkpoint.prefix}embed_tokens.weight")
    if tensor is not None and len(tensor.shape) == 2 and tensor.dtype != "U8":
        return tensor.shape[0]
    return checkpoint.dims("vocab_size")


def token_text(value: Any) -> str | None:
    """A special token of tokenizer_config.json, written as a string or as an object with `content`."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


# -----------------------------------------------------------------------------

SMALLEST_SHARE = 0.8
"""A tokenizer that fills less of the embedding than this belongs to another model, as a rule."""


def check_tokenizer(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Findings on tokenizer.json, tokenizer_config.json and the special tokens of config.json."""
    yield from _configured_ids(checkpoint)
    if not any(name in checkpoint.files for name in TOKENIZER_FILES):
        title = "no tokenizer: a server needs --tokenizer"
        yield warned("tokenizer_conflict", title, looked_for=list(TOKENIZER_FILES))
        return
    settings = checkpoint.document("tokenizer_config.json")
    if isinstance(settings, BrokenDocument):
        yield found("tokenizer_conflict", f"tokenizer_config.json cannot be read: {settings.reason}")
        settings = None
    document = checkpoint.document("tokenizer.json")
    if isinstance(document, BrokenDocument):
        yield found("tokenizer_conflict", f"tokenizer.json cannot be read: {document.reason}")
        return
    if document is None:
        return
    vocabulary = read_vocabulary(document)
    if isinstance(vocabulary, str):
        yield found("tokenizer_conflict", f"tokenizer.json cannot be used: {vocabulary}")
        return
    yield from _against_embedding(checkpoint, vocabulary)
    yield from _inside(document, vocabulary)
    if isinstance(settings, dict):
        yield from _against_config(settings, vocabulary)


def _configured_ids(checkpoint: Checkpoint) -> Iterator[Finding]:
    rows = embedding_rows(checkpoint)
    if not rows:
        return
    for name, config in (
        ("config.json", checkpoint.text_config),
        ("generation_config.json", checkpoint.object("generation_config.json")),
    ):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
            value = config.get(key)
            outside = [
                v for v in (value if isinstance(value, list) else [value]) if type(v) is int and v >= rows
            ]
            if outside:
                title = f"{key} {outside[0]} of {name} is outside the {rows} rows of the embedding"
                yield found("tokenizer_conflict", title, key=key, value=outside, rows=rows)


def _against_embedding(checkpoint: Checkpoint, vocabulary: Vocabulary) -> Iterator[Finding]:
    rows, highest = embedding_rows(checkpoint), vocabulary.highest
    if not rows:
        return
    if highest >= rows:
        beyond = [t for t, i in (*vocabulary.ids.items(), *vocabulary.added.items()) if i >= rows]
        title = f"{plural(len(beyond), 'token')} with ids beyond the {rows} rows of the embedding (highest id {highest})"
        causes = [
            "the tokenizer belongs to another model",
            "tokens were added without resizing the embedding",
        ]
        yield found(
            "tokenizer_conflict", title, causes=causes, tokens=beyond[:SHOWN], highest=highest, rows=rows
        )
    elif highest + 1 < SMALLEST_SHARE * rows:
        title = f"the tokenizer has {highest + 1} tokens, the embedding {rows} rows"
        causes = ["the tokenizer belongs to another model"]
        yield warned("tokenizer_conflict", title, causes=causes, tokens=highest + 1, rows=rows)


def _inside(document: dict[str, Any], vocabulary: Vocabulary) -> Iterator[Finding]:
    if vocabulary.repeated:
        title = f"{plural(vocabulary.repeated, 'id')} of tokenizer.json given to two tokens"
        yield found("tokenizer_conflict", title, repeated=vocabulary.repeated)
    by_id = {i: t for t, i in vocabulary.ids.items()}
    clashing = [t for t, i in vocabulary.added.items() if i in by_id and by_id[i] != t]
    if clashing:
        title = f"{plural(len(clashing), 'added token')} with the id of another token: {some(clashing)}"
        yield found("tokenizer_conflict", title, tokens=clashing[:SHOWN])
    model = document["model"]
    merges = model.get("merges") if model.get("type") in {None, "BPE"} else None
    lost = _lost_merges(merges, vocabulary.ids) if isinstance(merges, list) else []
    if lost:
        title = f"{plural(len(lost), 'merge')} of tokenizer.json with parts that are no tokens: {some(lost)}"
        yield found("tokenizer_conflict", title, merges=lost[:SHOWN], count=len(lost))


def _lost_merges(merges: list[Any], ids: dict[str, int]) -> list[str]:
    """Merges whose parts or result are missing; the tokenizers library refuses to load them."""
    lost = []
    for merge in merges:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(p, str) for p in parts):
            lost.append(str(merge)[:40])
        elif parts[0] not in ids or parts[1] not in ids or parts[0] + parts[1] not in ids:
            lost.append(" ".join(parts)[:40])
    return lost


def _against_config(settings: dict[str, Any], vocabulary: Vocabulary) -> Iterator[Finding]:
    decoder = settings.get("added_tokens_decoder")
    by_id = {i: t for t, i in (*vocabulary.ids.items(), *vocabulary.added.items())}
    wrong = [
        f"{key}: {token_text(entry)!r}, not {by_id[int(key)]!r}"
        for key, entry in (decoder.items() if isinstance(decoder, dict) else ())
        if key.isdigit() and int(key) in by_id and token_text(entry) != by_id[int(key)]
    ]
    if wrong:
        title = f"tokenizer_config.json and tokenizer.json disagree on {plural(len(wrong), 'token')} ({some(wrong, 2)})"
        yield found(
            "tokenizer_conflict", title, causes=["the two come from different models"], tokens=wrong[:SHOWN]
        )
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        text = token_text(settings.get(key))
        if text is not None and vocabulary.id_of(text) is None:
            write = found if key == "eos_token" else warned
            yield write("tokenizer_conflict", f"{key} {text!r} is not in the vocabulary", key=key, token=text)


# -----------------------------------------------------------------------------
# Which tokens end an answer: config.json, generation_config.json and the tokenizer must agree.


def _ids(value: Any) -> set[int]:
    return {v for v in (value if isinstance(value, list) else [value]) if type(v) is int}


def check_end_of_text(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Engines stop at the generation config's tokens (else config.json's); the chat ends with the tokenizer's."""
    generation = _ids(checkpoint.object("generation_config.json").get("eos_token_id"))
    configured = _ids(checkpoint.text_config.get("eos_token_id")) | _ids(
        checkpoint.config.get("eos_token_id")
    )
    stops = generation | configured
    references = ["https://github.com/vllm-project/vllm/pull/5954"]
    if generation and configured and not generation & configured:
        title = f"config.json ends at {sorted(configured)}, generation_config.json at {sorted(generation)}"
        evidence = {"config": sorted(configured), "generation_config": sorted(generation)}
        yield warned("tokenizer_conflict", title, references=references, **evidence)
    text = token_text(checkpoint.object("tokenizer_config.json").get("eos_token"))
    vocabulary = read_vocabulary(checkpoint.object("tokenizer.json"))
    if text is None or not isinstance(vocabulary, Vocabulary):
        return
    own = vocabulary.id_of(text)
    if own is not None and stops and own not in stops:
        title = f"the tokenizer ends with {text!r} ({own}), but the configs stop at {sorted(stops)}"
        causes = ["the answer may never stop: its end token is not one that the engine knows"]
        yield warned(
            "tokenizer_conflict", title, causes=causes, references=references, token=text, stops=sorted(stops)
        )


# -----------------------------------------------------------------------------
# The chat template: present, parseable, and about the messages. It is parsed, never run.

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
