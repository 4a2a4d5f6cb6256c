"""Tokenizer and chat template: the tokenizer against itself, its config and the embedding; a template that ends."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from assay.checkpoint import SHOWN, found, plural, some, warned
from assay.checkpoint.documents import Document
from assay.checkpoint.draft import is_draft
from assay.checkpoint.subject import BrokenDocument, Checkpoint
from assay.verdict import Finding

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json", "spiece.model", "sentencepiece.bpe.model",
    "vocab.txt", "tokenizer.tiktoken", "qwen.tiktoken",
)  # fmt: skip
SMALLEST_SHARE = 0.8
"""A tokenizer that fills less of the embedding than this belongs to another model, as a rule."""


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


def read_vocabulary(document: Document) -> Vocabulary | None:
    """The vocabulary of a tokenizer.json, or None if it gives none that can be read."""
    ids = (document.get("model") or {}).get("vocab")
    if ids is None:
        return None
    if isinstance(ids, list):  # Unigram: [token, score] by id
        ids = {row[0]: i for i, row in enumerate(ids)}
    entries = document.get("added_tokens") or ()
    added = {e["content"]: e["id"] for e in entries if e.get("content") is not None and e.get("id") is not None}
    return Vocabulary(ids, added, len(ids) - len(set(ids.values())))


def embedding_rows(checkpoint: Checkpoint) -> int | None:
    """Rows of the embedding as stored, else as configured."""
    tensor = checkpoint.tensors.get(f"{checkpoint.prefix}embed_tokens.weight")
    if tensor is not None and len(tensor.shape) == 2 and tensor.dtype != "U8":
        return tensor.shape[0]
    return checkpoint.dims("vocab_size")


def check_tokenizer(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Findings on tokenizer.json, tokenizer_config.json and the special tokens of config.json."""
    yield from _configured_ids(checkpoint)
    if not any(name in checkpoint.files for name in TOKENIZER_FILES):
        if not is_draft(checkpoint):  # which is served with its target's
            title = "no tokenizer: a server needs --tokenizer"
            yield warned("tokenizer_conflict", title, looked_for=list(TOKENIZER_FILES))
        return
    for name in ("tokenizer_config.json", "tokenizer.json"):
        broken = checkpoint.document(name)
        if isinstance(broken, BrokenDocument):
            yield found("tokenizer_conflict", f"{name} cannot be read: {broken.reason}")
    document = checkpoint.document("tokenizer.json")
    if not isinstance(document, dict):
        return
    vocabulary = read_vocabulary(document)
    if vocabulary is None:
        if not checkpoint.nonsense("tokenizer.json"):
            yield found("tokenizer_conflict", "tokenizer.json cannot be used: it has no model with a vocabulary")
        return
    yield from _against_embedding(checkpoint, vocabulary)
    yield from _inside(document, vocabulary)
    yield from _against_config(checkpoint.object("tokenizer_config.json"), vocabulary)


def _ids(value: Any) -> set[int]:
    return set(value) if isinstance(value, list) else set() if value is None else {value}


def _configured_ids(checkpoint: Checkpoint) -> Iterator[Finding]:
    rows = embedding_rows(checkpoint)
    generation = checkpoint.object("generation_config.json")
    for name, config in (("config.json", checkpoint.text_config), ("generation_config.json", generation)):
        for key in ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"):
            outside = sorted(v for v in _ids(config.get(key)) if rows and v >= rows)
            if outside:
                title = f"{key} {outside[0]} of {name} is outside the {rows} rows of the embedding"
                yield found("tokenizer_conflict", title, key=key, value=outside, rows=rows)


def _against_embedding(checkpoint: Checkpoint, vocabulary: Vocabulary) -> Iterator[Finding]:
    rows, highest = embedding_rows(checkpoint), vocabulary.highest
    if rows and highest >= rows:
        beyond = [t for t, i in (*vocabulary.ids.items(), *vocabulary.added.items()) if i >= rows]
        title = (
            f"{plural(len(beyond), 'token')} with ids beyond the {rows} rows of the embedding (highest id {highest})"
        )
        causes = ["the tokenizer belongs to another model", "tokens were added without resizing the embedding"]
        yield found("tokenizer_conflict", title, causes=causes, tokens=beyond[:SHOWN], highest=highest, rows=rows)
    elif rows and highest + 1 < SMALLEST_SHARE * rows:
        title = f"the tokenizer has {highest + 1} tokens, the embedding {rows} rows"
        causes = ["the tokenizer belongs to another model"]
        yield warned("tokenizer_conflict", title, causes=causes, tokens=highest + 1, rows=rows)


def _inside(document: Document, vocabulary: Vocabulary) -> Iterator[Finding]:
    if vocabulary.repeated:
        title = f"{plural(vocabulary.repeated, 'id')} of tokenizer.json given to two tokens"
        yield found("tokenizer_conflict", title, repeated=vocabulary.repeated)
    by_id = {i: t for t, i in vocabulary.ids.items()}
    clashing = [t for t, i in vocabulary.added.items() if i in by_id and by_id[i] != t]
    if clashing:
        title = f"{plural(len(clashing), 'added token')} with the id of another token: {some(clashing)}"
        yield found("tokenizer_conflict", title, tokens=clashing[:SHOWN])
    entries = document.get("added_tokens") or ()
    bare = [e for e in entries if e.get("id") is None or e.get("content") is None]
    if bare:
        yield found("tokenizer_conflict", f"{plural(len(bare), 'added token')} without an id or without content")
    model = document["model"]
    merges = model.get("merges") or () if model.get("type") in {None, "BPE"} else ()
    lost = _lost_merges(merges, vocabulary.ids)
    if lost:
        title = f"{plural(len(lost), 'merge')} of tokenizer.json with parts that are no tokens: {some(lost)}"
        yield found("tokenizer_conflict", title, merges=lost[:SHOWN], count=len(lost))


def _lost_merges(merges: list[Any] | tuple[()], ids: dict[str, int]) -> list[str]:
    """Merges whose parts or result are missing; the tokenizers library refuses to load them."""
    lost = []
    for merge in merges:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(p, str) for p in parts):
            lost.append(repr(merge)[:40])
        elif parts[0] not in ids or parts[1] not in ids or parts[0] + parts[1] not in ids:
            lost.append(" ".join(parts)[:40])
    return lost


def _against_config(settings: Document, vocabulary: Vocabulary) -> Iterator[Finding]:
    decoder = settings.get("added_tokens_decoder") or {}
    by_id = {i: t for t, i in (*vocabulary.ids.items(), *vocabulary.added.items())}
    numbers = {key: int(key) for key in decoder if key.isdecimal() and len(key) < 10}
    wrong = [
        f"{key}: {token_text(decoder[key])!r}, not {by_id[i]!r}"
        for key, i in numbers.items()
        if i in by_id and token_text(decoder[key]) != by_id[i]
    ]
    if wrong:
        title = f"tokenizer_config.json and tokenizer.json disagree on {plural(len(wrong), 'token')} ({some(wrong, 2)})"
        causes = ["the two come from different models"]
        yield found("tokenizer_conflict", title, causes=causes, tokens=wrong[:SHOWN])
    strange = [key for key in decoder if key not in numbers]
    if strange:
        title = (
            f"added_tokens_decoder of tokenizer_config.json has keys that are no ids: {some(k[:40] for k in strange)}"
        )
        yield found("tokenizer_conflict", title)
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        text = token_text(settings.get(key))
        if text is not None and vocabulary.id_of(text) is None:
            write = found if key == "eos_token" else warned
            yield write("tokenizer_conflict", f"{key} {text[:40]!r} is not in the vocabulary", key=key, token=text[:40])


# -----------------------------------------------------------------------------
# Which tokens end an answer: config.json, generation_config.json, the tokenizer and the template must agree.

_REFERENCE = "https://github.com/vllm-project/vllm/pull/5954"


def check_end_of_text(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Engines stop at the generation config's tokens (else config.json's) and at the tokenizer's end token."""
    generation = _ids(checkpoint.object("generation_config.json").get("eos_token_id"))
    configured = _ids(checkpoint.text_config.get("eos_token_id")) | _ids(checkpoint.config.get("eos_token_id"))
    if generation and configured - generation:
        said, stops = sorted(configured), sorted(generation)
        title = f"config.json ends at {said}, generation_config.json at {stops}"
        if configured & generation:
            title = f"generation_config.json drops end tokens of config.json: {sorted(configured - generation)}"
        detail = "Engines stop at the tokens of generation_config.json only, and run on over the others."
        remedies = [f"set eos_token_id of generation_config.json to {sorted(configured | generation)}"]
        yield warned(
            "tokenizer_conflict", title, detail=detail, remedies=remedies, references=[_REFERENCE], config=said,
            generation_config=stops,
        )  # fmt: skip
    settings = checkpoint.object("tokenizer_config.json")
    text = token_text(settings.get("eos_token"))
    vocabulary = read_vocabulary(checkpoint.object("tokenizer.json"))
    if vocabulary is None:
        return
    own, stops_at = vocabulary.id_of(text) if text else None, generation or configured
    if own is not None and stops_at and own not in generation | configured:
        title = f"the tokenizer ends with {text!r} ({own}), but the configs stop at {sorted(stops_at)}"
        causes = ["the answer may never stop: its end token is not one that the engine knows"]
        evidence = {"token": text, "stops": sorted(stops_at)}
        yield warned("tokenizer_conflict", title, causes=causes, references=[_REFERENCE], **evidence)
    yield from _turn_end(checkpoint, vocabulary, stops_at | ({own} if own is not None else set()))


def _turn_end(checkpoint: Checkpoint, vocabulary: Vocabulary, stops: set[int]) -> Iterator[Finding]:
    """The token that the chat template writes after an answer is one that the model learned to end with."""
    for where, template in templates(checkpoint).items() if stops else ():
        ends = turn_end(template, special_tokens(checkpoint), vocabulary.added)
        known = {vocabulary.added[token] for token in ends}
        if known and not known & stops:
            token = ends[0]
            title = f"the chat template ends a turn with {token!r} ({vocabulary.added[token]}), and nothing stops there"
            causes = ["eos_token_id is that of the base model, or was lost when converting"]
            detail = (
                "A model that learned this template writes the token and goes on: the answer runs into the next turn."
            )
            remedies = [f"add {vocabulary.added[token]} to eos_token_id of generation_config.json"]
            yield warned(
                "tokenizer_conflict", title, detail=detail, causes=causes, remedies=remedies, path=where, token=token,
                stops=sorted(stops),
            )  # fmt: skip


# -----------------------------------------------------------------------------
# The chat template: present, parseable, about the messages, and a program that comes to an end.


MAX_CHARACTERS = 400_000
_FILE = "chat_template.jinja"
MAX_TEMPLATES = 16

Special = tuple[tuple[str, str], ...]


def templates(checkpoint: Checkpoint) -> dict[str, Any]:
    """Templates by where they stand: the file of its own, chat_template.json, tokenizer_config.json."""
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
    named = ((key, token_text(settings.get(key))) for key in ("bos_token", "eos_token", "pad_token", "unk_token"))
    return tuple((key, text) for key, text in named if text)


def token_text(value: Any) -> str | None:
    """A special token of tokenizer_config.json, written as a string or as an object with `content`."""
    return (value.get("content") if isinstance(value, dict) else value) or None


def template_problem(text: Any, special: Special = ()) -> str | None:
    """What is wrong with a template, as the end of a sentence, or None."""
    import jinja2
    from jinja2 import nodes

    import assay.checkpoint.rules.render as render

    if not isinstance(text, str):
        return "is not text"
    if not text.strip():
        return "is empty"
    if len(text) > MAX_CHARACTERS:
        return f"is {len(text)} characters long"
    try:
        # Only parsed here: looking for undeclared variables would compute constants, such as 9**9**9.
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
        return f"does not finish two messages within {render.CPU_S} s, {render.MEMORY >> 30} GiB and {render.MAX_CHARACTERS} characters"
    return None


def turn_end(text: Any, special: Special, added: Collection[str]) -> tuple[str, ...]:
    """The tokens that a template writes right after an answer; none if it writes none or cannot be rendered."""
    import assay.checkpoint.rules.render as render

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
