"""Rules on a checkpoint's small files: config, rope, generation config, tokenizer and chat
template, each against itself, the others and the tensors' shapes. A rule is a function with a line
in RULES, or an entry point of another package.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from assay.checkpoint import SHOWN, found, plural, some, warned
from assay.checkpoint.declared import weight_shape
from assay.checkpoint.documents import INDEX, ROPE, TABLES, Document
from assay.checkpoint.draft import is_draft
from assay.checkpoint.structure import FAMILIES, Dims, head_name, is_stored
from assay.checkpoint.subject import BrokenDocument, Checkpoint
from assay.plugins import load
from assay.verdict import Finding

# The documents against themselves and against the tensors' shapes: config, rope, generation config.


def check_documents(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Values that are not what their keys take, in every document that the rules read."""
    for name in TABLES:
        nonsense = checkpoint.nonsense(name)
        for entry in nonsense[:SHOWN]:
            area = "tokenizer_conflict" if name.startswith("tokenizer") else "config_conflict"
            if "quant" in name or entry.path.startswith(
                ("quantization_config", "compression_config", "text_config.quant")
            ):
                area = "quantization_conflict"
            write = found if entry.serious else warned
            detail = (
                ""
                if entry.serious
                else "Engines read it too, or pass it on; whether they stop differs."
            )
            yield write(
                "index_mismatch" if name == INDEX else area,
                f"{name} {entry.text}",
                detail=detail,
                key=entry.path,
                value=repr(entry.value)[:80],
                remedies=[f"take {name} from the original repository"],
            )
        if len(nonsense) > SHOWN:
            more = plural(len(nonsense) - SHOWN, "more value")
            yield found("config_conflict", f"{name} has {more} that are not what their keys take")


def check_config(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Contradictions of config.json."""
    document = checkpoint.document("config.json")
    if isinstance(document, BrokenDocument):
        remedies = ["download config.json again"]
        yield found(
            "config_conflict", f"config.json cannot be read: {document.reason}", remedies=remedies
        )
    if not isinstance(document, dict):
        return
    for key in ("quantization_config", "compression_config"):
        if document.get(key) == {}:
            yield found(
                "quantization_conflict",
                f"config.json has an empty {key}: engines find no method in it",
            )
    yield from _heads(checkpoint)
    yield from _layers(checkpoint)
    yield from _layer_types(checkpoint)
    yield from _embedding_rows(checkpoint)
    yield from _dtype(checkpoint)
    yield from _tie(checkpoint)


def _heads(checkpoint: Checkpoint) -> Iterator[Finding]:
    d = Dims(checkpoint.text_config)
    if not d.hidden or not d.heads:
        return
    if d.config.get("head_dim") == 0 and checkpoint.model_type in FAMILIES:
        yield found(
            "config_conflict",
            f"head_dim is 0; {d.heads} heads of {d.hidden} need {d.head_dim}",
            head_dim=0,
        )
        return
    if not d.get("head_dim") and not d.get("qk_nope_head_dim") and d.hidden % d.heads:
        title = (
            f"hidden_size {d.hidden} is not divisible by {d.heads} heads, and no head_dim is given"
        )
        yield found("config_conflict", title, hidden_size=d.hidden, num_attention_heads=d.heads)
        return
    if d.heads % d.kv_heads:
        title = f"{d.heads} query heads cannot share {d.kv_heads} key-value heads"
        yield found(
            "config_conflict", title, num_attention_heads=d.heads, num_key_value_heads=d.kv_heads
        )
        return
    layout = FAMILIES.get(checkpoint.model_type)
    for projection, count in (("q_proj", d.heads), ("k_proj", d.kv_heads)):
        # Every layout names its attention first; hundreds of experts need not be counted for it.
        wanted = {
            shape[0]
            for i in range(min(d.layers, 64))
            for name, shape in takewhile(
                lambda piece: ".experts." not in piece[0], layout(d, i) if layout else ()
            )
            if name == f"self_attn.{projection}.weight"
        }
        stored = _rows(checkpoint, projection)
        if len(stored) == 1 and len(wanted) == 1 and stored != wanted:
            (rows,), (expected,) = stored, wanted
            title = (
                f"every {projection} has {rows} rows; {count} heads of {d.head_dim} need {expected}"
            )
            causes = ["head_dim, or a number of heads, was changed in config.json"]
            fits = (
                rows * d.head_dim // expected
                if expected and rows * d.head_dim % expected == 0
                else None
            )
            remedies = [f"head_dim {fits} would fit"] if fits and projection == "q_proj" else []
            yield found(
                "config_conflict",
                title,
                causes=causes,
                remedies=remedies,
                rows=rows,
                expected=expected,
            )
            return


def _rows(checkpoint: Checkpoint, projection: str) -> set[int]:
    rows = set()
    for module, params in checkpoint.modules.items():
        if module.startswith(f"{checkpoint.prefix}layers.") and module.endswith(
            f".self_attn.{projection}"
        ):
            shape = weight_shape(params)
            if shape is not None and len(shape) == 2:
                rows.add(shape[0])
    return rows


def _layers(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Stored layers beyond the configured number, unless they are a draft head that lies there."""
    count = checkpoint.dims("num_hidden_layers")
    if count is None:
        return
    beyond: dict[int, set[str]] = defaultdict(set)
    start = f"{checkpoint.prefix}layers."
    for module in checkpoint.modules:
        if module.startswith(start):
            index, _, tail = module[len(start) :].partition(".")
            if index.isdecimal() and len(index) < 8 and int(index) >= count:
                beyond[int(index)].add(tail)
    marks = {"eh_proj", "enorm", "hnorm", "shared_head.norm"}
    extra = sorted(i for i, tails in beyond.items() if not tails & marks)
    if extra:
        title = f"config.json says {count} layers, the tensors go on to layer {extra[-1]}"
        causes = ["num_hidden_layers was changed", "config.json belongs to a smaller model"]
        yield found(
            "config_conflict", title, causes=causes, num_hidden_layers=count, stored=extra[-1] + 1
        )


def _layer_types(checkpoint: Checkpoint) -> Iterator[Finding]:
    config = checkpoint.text_config
    types, count, window = (
        config.get("layer_types"),
        config.get("num_hidden_layers"),
        config.get("sliding_window"),
    )
    if not types:
        return
    if count and len(types) != count:
        title = f"layer_types names {len(types)} layers, num_hidden_layers is {count}"
        yield found("config_conflict", title, layer_types=len(types), num_hidden_layers=count)
    if (
        window
        and config.get("use_sliding_window") is not False
        and set(types) == {"full_attention"}
    ):
        title = f"sliding_window is {window}, but every layer attends in full"
        references = ["https://github.com/vllm-project/vllm/issues/49795"]
        yield warned("config_conflict", title, references=references, sliding_window=window)


def _embedding_rows(checkpoint: Checkpoint) -> Iterator[Finding]:
    """For families without a known layout; the others are held to all their shapes."""
    tensor, vocab = (
        checkpoint.tensors.get(f"{checkpoint.prefix}embed_tokens.weight"),
        checkpoint.dims("vocab_size"),
    )
    if checkpoint.model_type in FAMILIES or tensor is None or not vocab or tensor.dtype == "U32":
        return
    if len(tensor.shape) == 2 and tensor.shape[0] != vocab:
        title = f"the embedding has {tensor.shape[0]} rows, vocab_size is {vocab}"
        yield found("tensor_shape", title, tensor=tensor.name, shape=tensor.shape, vocab_size=vocab)


def _dtype(checkpoint: Checkpoint) -> Iterator[Finding]:
    places = (checkpoint.text_config, checkpoint.config)
    said = next(
        (v for config in places for key in ("dtype", "torch_dtype") if (v := config.get(key))), ""
    )
    stored = {
        t.dtype
        for t in checkpoint.tensors.values()
        if t.dtype in {"BF16", "F16"} and len(t.shape) == 2
    }
    if said.removeprefix("torch.") in {"float16", "half"} and stored == {"BF16"}:
        title = (
            "config.json says float16, the weights are bfloat16: values beyond 65504 overflow"
            " to inf"
        )
        references = ["https://github.com/vllm-project/vllm/issues/14126"]
        remedies = ["set dtype to bfloat16 in config.json, or serve with --dtype bfloat16"]
        yield warned(
            "config_conflict",
            title,
            remedies=remedies,
            references=references,
            dtype=said,
            stored="BF16",
        )


def _tie(checkpoint: Checkpoint) -> Iterator[Finding]:
    nested, top = (
        c.get("tie_word_embeddings") for c in (checkpoint.text_config, checkpoint.config)
    )
    if (
        None not in {nested, top}
        and nested != top
        and not is_stored(checkpoint, head_name(checkpoint))
    ):
        title = (
            f"tie_word_embeddings is {top} at the top and {nested} in the text config, and no head"
            " is stored"
        )
        references = ["https://github.com/huggingface/transformers/issues/43429"]
        yield found("config_conflict", title, references=references, top=top, nested=nested)


# Rotary position settings: old key against new key, scaling factors against lengths.

_TYPES = frozenset(
    {
        "default",
        "linear",
        "dynamic",
        "yarn",
        "longrope",
        "su",
        "llama3",
        "mrope",
        "proportional",
        "deepseek_yarn",
        "dynamic_alpha",
        "deepseek_llama_scaling",
        "xdrope",
    }
)
_NEEDS_FACTOR = frozenset({"linear", "dynamic", "yarn", "llama3", "deepseek_yarn"})
_LLAMA3 = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def check_rope(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Contradictions in rope_scaling, rope_parameters and rope_theta."""
    config = checkpoint.text_config
    both: list[Document] = [
        s for key in ("rope_scaling", "rope_parameters") if (s := config.get(key)) is not None
    ]
    if len(both) == 2:
        differing = sorted(k for k in both[0] if k in both[1] and both[0][k] != both[1][k])
        if differing:
            title = f"rope_scaling and rope_parameters disagree on {', '.join(differing)}"
            yield found("config_conflict", title, rope_scaling=both[0], rope_parameters=both[1])
    theta = config.get("rope_theta")
    for settings in both:
        yield from _settings(settings, config)
        inner = settings.get("rope_theta")
        if theta is not None and inner is not None and theta != inner:
            title = (
                f"rope_theta is {_shown(theta)} at the top and {_shown(inner)} in the rope settings"
            )
            yield found("config_conflict", title, top=theta, nested=inner)


def _shown(value: float | list[float]) -> str:
    return str(value)[:40] if isinstance(value, list) else f"{value:g}"


def _settings(settings: Document, config: Document) -> Iterator[Finding]:
    for key, inner in settings.items():
        if key not in ROPE and isinstance(inner, dict):  # one entry per kind of attention
            yield from _settings(inner, config)
    old, new = settings.get("type"), settings.get("rope_type")
    kind = new or old
    if (
        old
        and new
        and old != new
        and {old, new} != {"su", "longrope"}
        and "mrope" not in {old, new}
    ):
        references = ["https://github.com/vllm-project/vllm/issues/10293"]
        title = (
            f"rope_scaling has type {old!r} and rope_type {new!r}: versions read one or the other"
        )
        yield found("config_conflict", title, references=references, type=old, rope_type=new)
    if not kind:
        return
    if kind not in _TYPES:
        yield warned(
            "config_conflict",
            f"rope type {kind[:40]!r} is not one that engines know",
            rope_type=kind[:40],
        )
    factor = settings.get("factor")
    if kind in _NEEDS_FACTOR and (factor is None or factor < 1):
        given = "gives none" if factor is None else f"gives {factor:g}"
        title = f"rope type {kind} needs a factor of at least 1, the config {given}"
        yield found("config_conflict", title, factor=factor)
    lacking = [k for k in _LLAMA3 if settings.get(k) is None] if kind == "llama3" else []
    if lacking:
        yield found(
            "config_conflict", f"rope type llama3 lacks {', '.join(lacking)}", missing=lacking
        )
    if kind in {"longrope", "su"}:
        yield from _longrope(settings, config)
    original, limit = (
        settings.get("original_max_position_embeddings"),
        config.get("max_position_embeddings"),
    )
    if original and limit and original > limit:
        title = (
            f"original_max_position_embeddings {original} is beyond max_position_embeddings {limit}"
        )
        yield found("config_conflict", title, original=original, limit=limit)


def _longrope(settings: Document, config: Document) -> Iterator[Finding]:
    d, partial = (
        Dims(config),
        config.get("partial_rotary_factor") or settings.get("partial_rotary_factor") or 1.0,
    )
    rotary = d.get("qk_rope_head_dim") or int(d.head_dim * partial)
    for key in ("short_factor", "long_factor"):
        factors = settings.get(key)
        if factors is None:
            yield found("config_conflict", f"rope type longrope lacks {key}", missing=key)
        elif rotary and len(factors) != rotary // 2:
            title = (
                f"{key} has {len(factors)} entries, {rotary} rotary dimensions need {rotary // 2}"
            )
            yield found("config_conflict", title, key=key, entries=len(factors), needed=rotary // 2)


NAME = "generation_config.json"


def check_generation(checkpoint: Checkpoint) -> Iterator[Finding]:
    """A generation config, whose sampling settings a server takes over, that is missing, broken, or
    hides a fault.
    """
    document = checkpoint.document(NAME)
    if isinstance(document, BrokenDocument):
        yield found("config_conflict", f"{NAME} cannot be read: {document.reason}", path=NAME)
    elif document is None and checkpoint.config.get("architectures") and not is_draft(checkpoint):
        title = (
            f"no {NAME}: servers fall back on their own sampling defaults and on config.json's end"
            " tokens"
        )
        yield warned("config_conflict", title, path=NAME)
    penalty = checkpoint.object(NAME).get("repetition_penalty") or 1
    if penalty >= 1.2:
        title = (
            f"{NAME} sets repetition_penalty to {penalty:g}, which hides loops of a broken model"
        )
        yield warned("config_conflict", title, repetition_penalty=penalty)


# Tokenizer and chat template: the tokenizer against itself, its config and the embedding; a
# template that ends.


TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "tekken.json",
    "spiece.model",
    "sentencepiece.bpe.model",
    "vocab.txt",
    "tokenizer.tiktoken",
    "qwen.tiktoken",
)
SMALLEST_SHARE = 0.8
"""A tokenizer that fills less of the embedding than this belongs to another model, as a rule."""


@dataclass(frozen=True)
class Vocabulary:
    """Token ids by text: the model's own and the added ones. `repeated` counts ids that two tokens
    share.
    """

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
    added = {
        e["content"]: e["id"]
        for e in entries
        if e.get("content") is not None and e.get("id") is not None
    }
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
            yield found(
                "tokenizer_conflict",
                "tokenizer.json cannot be used: it has no model with a vocabulary",
            )
        return
    yield from _against_embedding(checkpoint, vocabulary)
    yield from _inside(document, vocabulary)
    yield from _against_config(checkpoint.object("tokenizer_config.json"), vocabulary)


def _ids(value: Any) -> set[int]:
    return set(value) if isinstance(value, list) else set() if value is None else {value}


def _configured_ids(checkpoint: Checkpoint) -> Iterator[Finding]:
    rows = embedding_rows(checkpoint)
    generation = checkpoint.object("generation_config.json")
    for name, config in (
        ("config.json", checkpoint.text_config),
        ("generation_config.json", generation),
    ):
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
            f"{plural(len(beyond), 'token')} with ids beyond the {rows} rows of the embedding"
            f" (highest id {highest})"
        )
        causes = [
            "the tokenizer belongs to another model",
            "tokens were added without resizing the embedding",
        ]
        yield found(
            "tokenizer_conflict",
            title,
            causes=causes,
            tokens=beyond[:SHOWN],
            highest=highest,
            rows=rows,
        )
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
        title = (
            f"{plural(len(clashing), 'added token')} with the id of another token: {some(clashing)}"
        )
        yield found("tokenizer_conflict", title, tokens=clashing[:SHOWN])
    entries = document.get("added_tokens") or ()
    bare = [e for e in entries if e.get("id") is None or e.get("content") is None]
    if bare:
        yield found(
            "tokenizer_conflict",
            f"{plural(len(bare), 'added token')} without an id or without content",
        )
    model = document["model"]
    merges = model.get("merges") or () if model.get("type") in {None, "BPE"} else ()
    lost = _lost_merges(merges, vocabulary.ids)
    if lost:
        title = (
            f"{plural(len(lost), 'merge')} of tokenizer.json with parts that are no tokens:"
            f" {some(lost)}"
        )
        yield found("tokenizer_conflict", title, merges=lost[:SHOWN], count=len(lost))


def _lost_merges(merges: list[Any] | tuple[()], ids: dict[str, int]) -> list[str]:
    """Merges whose parts or result are missing; the tokenizers library refuses to load them."""
    lost = []
    for merge in merges:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if (
            not isinstance(parts, list)
            or len(parts) != 2
            or not all(isinstance(p, str) for p in parts)
        ):
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
        title = (
            f"tokenizer_config.json and tokenizer.json disagree on {plural(len(wrong), 'token')}"
            f" ({some(wrong, 2)})"
        )
        causes = ["the two come from different models"]
        yield found("tokenizer_conflict", title, causes=causes, tokens=wrong[:SHOWN])
    strange = [key for key in decoder if key not in numbers]
    if strange:
        title = (
            "added_tokens_decoder of tokenizer_config.json has keys that are no ids:"
            f" {some(k[:40] for k in strange)}"
        )
        yield found("tokenizer_conflict", title)
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        text = token_text(settings.get(key))
        if text is not None and vocabulary.id_of(text) is None:
            write = found if key == "eos_token" else warned
            yield write(
                "tokenizer_conflict",
                f"{key} {text[:40]!r} is not in the vocabulary",
                key=key,
                token=text[:40],
            )


# Which tokens end an answer: config.json, generation_config.json, the tokenizer and the template
# must agree.

_REFERENCE = "https://github.com/vllm-project/vllm/pull/5954"


def check_end_of_text(checkpoint: Checkpoint) -> Iterator[Finding]:
    """Engines stop at the generation config's tokens (else config.json's) and at the tokenizer's
    end token.
    """
    generation = _ids(checkpoint.object("generation_config.json").get("eos_token_id"))
    configured = _ids(checkpoint.text_config.get("eos_token_id")) | _ids(
        checkpoint.config.get("eos_token_id")
    )
    if generation and configured - generation:
        said, stops = sorted(configured), sorted(generation)
        title = f"config.json ends at {said}, generation_config.json at {stops}"
        if configured & generation:
            title = (
                "generation_config.json drops end tokens of config.json:"
                f" {sorted(configured - generation)}"
            )
        detail = (
            "Engines stop at the tokens of generation_config.json only, and run on over the others."
        )
        remedies = [
            f"set eos_token_id of generation_config.json to {sorted(configured | generation)}"
        ]
        yield warned(
            "tokenizer_conflict",
            title,
            detail=detail,
            remedies=remedies,
            references=[_REFERENCE],
            config=said,
            generation_config=stops,
        )
    settings = checkpoint.object("tokenizer_config.json")
    text = token_text(settings.get("eos_token"))
    vocabulary = read_vocabulary(checkpoint.object("tokenizer.json"))
    if vocabulary is None:
        return
    own, stops_at = vocabulary.id_of(text) if text else None, generation or configured
    if own is not None and stops_at and own not in generation | configured:
        title = (
            f"the tokenizer ends with {text!r} ({own}), but the configs stop at {sorted(stops_at)}"
        )
        causes = ["the answer may never stop: its end token is not one that the engine knows"]
        evidence = {"token": text, "stops": sorted(stops_at)}
        yield warned(
            "tokenizer_conflict", title, causes=causes, references=[_REFERENCE], **evidence
        )
    yield from _turn_end(checkpoint, vocabulary, stops_at | ({own} if own is not None else set()))


def _turn_end(checkpoint: Checkpoint, vocabulary: Vocabulary, stops: set[int]) -> Iterator[Finding]:
    """The token that the chat template writes after an answer is one that the model learned to end
    with.
    """
    for where, template in templates(checkpoint).items() if stops else ():
        ends = turn_end(template, special_tokens(checkpoint), vocabulary.added)
        known = {vocabulary.added[token] for token in ends}
        if known and not known & stops:
            token = ends[0]
            title = (
                f"the chat template ends a turn with {token!r} ({vocabulary.added[token]}), and"
                " nothing stops there"
            )
            causes = ["eos_token_id is that of the base model, or was lost when converting"]
            detail = (
                "A model that learned this template writes the token and goes on: the answer runs"
                " into the next turn."
            )
            remedies = [f"add {vocabulary.added[token]} to eos_token_id of generation_config.json"]
            yield warned(
                "tokenizer_conflict",
                title,
                detail=detail,
                causes=causes,
                remedies=remedies,
                path=where,
                token=token,
                stops=sorted(stops),
            )


# The chat template: present, parseable, about the messages, and a program that comes to an end.


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


def token_text(value: Any) -> str | None:
    """A special token of tokenizer_config.json, written as a string or as an object with `content`."""
    return (value.get("content") if isinstance(value, dict) else value) or None


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


# All rules.


Rule = Callable[[Checkpoint], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    check_documents,
    check_config,
    check_rope,
    check_generation,
    check_tokenizer,
    check_end_of_text,
    check_chat_template,
)


def all_rules() -> tuple[Rule, ...]:
    """Those of assay, then those of other packages."""
    return (*RULES, *load("assay.rules").values())


__all__ = ["RULES", "Rule", "all_rules"]
