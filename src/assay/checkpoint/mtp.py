"""Is the multi-token-prediction head there, whole, and stored as the checkpoint declares?"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from assay.checkpoint import SHOWN, found, noted, plural, some, structure, warned
from assay.checkpoint.declared import PLAIN, Declared, Kind
from assay.checkpoint.documents import Document
from assay.checkpoint.quantization import weights
from assay.checkpoint.schemes import parse
from assay.checkpoint.serve_args import TABLED, Version
from assay.checkpoint.structure import (
    MAX_PIECES,
    Dims,
    Layer,
    Piece,
    Shape,
    attention,
    is_stored,
    linear,
    norms,
)
from assay.checkpoint.subject import Checkpoint, open_checkpoint
from assay.verdict import Finding, Severity

# Who announces a multi-token-prediction head, where, and which tensors it then owes.
#
# One `Family` per layout. `layout` gives names and shapes for a head of some depth; families whose
# inner layout differs from config to config give only `prefixes`, and their head owes what the
# backbone's layers have in common.

Layout = Callable[[Dims, int], Iterator[Piece]]
"""(dimensions, depth) to (full tensor name, shape)."""


@dataclass(frozen=True)
class Family:
    """One way to ship a head.

    `keys` announce its depth, at the top level or in the text config; `default` holds where no key
    is given. `prefixes(depth, layers)` are the beginnings of its tensor names. `checked_since` is
    the vLLM version from which the loader refuses a missing head for this family, None where no
    version does.
    """

    name: str
    keys: tuple[str, ...]
    prefixes: Callable[[int, int], tuple[str, ...]]
    layout: Layout | None = None
    default: int = 0
    forced: int | None = None
    checked_since: str | None = None
    draft_class: str = ""


_NEXTN = ("num_nextn_predict_layers", "num_mtp_layers")


def _under(*prefixes: str) -> Callable[[int, int], tuple[str, ...]]:
    return lambda depth, layers: prefixes


def _after_layers(depth: int, layers: int) -> tuple[str, ...]:
    """Layers counted on after the backbone's last; without an announced depth, one is looked for."""
    return tuple(f"model.layers.{layers + i}." for i in range(max(depth, 1)))


def _below(parent: str, pieces: Iterator[Piece]) -> Iterator[Piece]:
    return ((f"{parent}.{name}", shape) for name, shape in pieces)


def qwen(d: Dims, depth: int) -> Iterator[Piece]:
    """Qwen3.5 and Qwen3-Next: fc over embedding and hidden state, then full-attention layers.
    Dense: 15 tensors.
    """
    yield from linear("mtp.fc", d.hidden, 2 * d.hidden)
    yield from _below("mtp", norms(d, "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"))
    for i in range(depth):
        at = f"mtp.layers.{i}"
        yield from _below(at, attention(d, qk_norm="head", gated=True))
        yield from _below(at, structure.shared_expert_moe(d, -1))
        yield from _below(at, norms(d, "input_layernorm", "post_attention_layernorm"))


def _whole_layer(layer: Layer) -> Layout:
    """DeepSeek V3 and GLM-4.5: a whole decoder layer after the last, with its own norms and entry
    projection.
    """

    def layout(d: Dims, depth: int) -> Iterator[Piece]:
        for index in range(d.layers, d.layers + depth):
            at = f"model.layers.{index}"
            yield from _below(at, norms(d, "enorm", "hnorm", "shared_head.norm"))
            yield from linear(f"{at}.eh_proj", d.hidden, 2 * d.hidden)
            yield from _below(at, layer(d, index))

    return layout


def mimo(d: Dims, depth: int) -> Iterator[Piece]:
    """MiMo-7B: Qwen2 layers below model.mtp_layers."""
    for i in range(depth):
        at = f"model.mtp_layers.{i}"
        yield from _below(at, norms(d, "token_layernorm", "hidden_layernorm", "final_layernorm"))
        yield from linear(f"{at}.input_proj", d.hidden, 2 * d.hidden)
        yield from _below(at, structure.FAMILIES["mimo"](d, i))


def ernie(d: Dims, depth: int) -> Iterator[Piece]:
    """ERNIE-4.5-MoE: a dense block without biases; glue in modules of its own."""
    for i in range(depth):
        yield from norms(d, f"model.mtp_emb_norm.{i}", f"model.mtp_hidden_norm.{i}")
        yield from linear(f"model.mtp_linear_proj.{i}", d.hidden, 2 * d.hidden)
        yield from _below(f"model.mtp_block.{i}", structure.FAMILIES["mistral"](d, i))


_MTP, _ANY_MTP = _under("mtp."), _under("mtp.", "model.mtp.")
_QWEN, _V32 = ("mtp_num_hidden_layers",), "0.32.0"
_ERNIE = _under(
    "model.mtp_emb_norm.", "model.mtp_hidden_norm.", "model.mtp_linear_proj.", "model.mtp_block."
)
_DEEPSEEK, _GLM = (_whole_layer(structure.FAMILIES[name]) for name in ("deepseek_v3", "glm4_moe"))

_KINDS: tuple[tuple[str, Family], ...] = (
    (
        "qwen3_5 qwen3_5_text intern_s2_preview",
        Family("qwen3.5", _QWEN, _MTP, qwen, draft_class="Qwen3_5MTP"),
    ),
    (
        "qwen3_5_moe qwen3_5_moe_text",
        Family("qwen3.5-moe", _QWEN, _MTP, qwen, draft_class="Qwen3_5MoeMTP"),
    ),
    ("interns2_mobius", Family("intern-s2-mobius", _QWEN, _MTP, draft_class="InternS2MobiusMTP")),
    ("qwen3_next", Family("qwen3-next", _NEXTN, _MTP, qwen, 1, draft_class="Qwen3NextMTP")),
    (
        "qwen4_exp qwen4_exp_text",
        Family("qwen4-exp", (*_QWEN, *_NEXTN), _MTP, draft_class="Qwen4ExpMTP"),
    ),
    (
        "deepseek_v3",
        Family("deepseek-v3", _NEXTN, _after_layers, _DEEPSEEK, 0, None, _V32, "DeepSeekMTPModel"),
    ),
    (
        "deepseek_v32",
        Family("deepseek-v3.2", _NEXTN, _after_layers, None, 0, None, _V32, "DeepseekV32MTPModel"),
    ),
    (
        "glm_moe_dsa",
        Family("glm-moe-dsa", _NEXTN, _after_layers, None, 0, None, _V32, "DeepseekV32MTPModel"),
    ),
    (
        "deepseek_v4 deepseek_v41",
        Family("deepseek-v4", _NEXTN, _MTP, None, 0, None, _V32, "DeepSeekV4MTPModel"),
    ),
    ("glm4_moe", Family("glm-4.5", _NEXTN, _after_layers, _GLM, draft_class="Glm4MoeMTPModel")),
    (
        "glm4_moe_lite",
        Family("glm-4-lite", _NEXTN, _after_layers, draft_class="Glm4MoeLiteMTPModel"),
    ),
    ("glm_ocr", Family("glm-ocr", _NEXTN, _after_layers, draft_class="GlmOcrMTPModel")),
    ("mimo", Family("mimo", _NEXTN, _under("model.mtp_layers."), mimo, draft_class="MiMoMTPModel")),
    (
        "mimo_v2 mimo_v2_flash",
        Family("mimo-v2", _NEXTN, _under("model.mtp."), forced=1, draft_class="MiMoV2MTPModel"),
    ),
    ("ernie4_5_moe", Family("ernie-4.5", _NEXTN, _ERNIE, ernie, draft_class="ErnieMTPModel")),
    (
        "nemotron_h nemotron_h_puzzle",
        Family(
            "nemotron-h",
            _NEXTN,
            _under("mtp.", "language_model.mtp."),
            draft_class="NemotronHMTPModel",
        ),
    ),
    ("exaone_moe exaone4_5", Family("exaone", _NEXTN, _MTP, default=1, draft_class="ExaoneMoeMTP")),
    (
        "longcat_flash",
        Family(
            "longcat-flash",
            _NEXTN,
            _under("model.mtp."),
            default=1,
            draft_class="LongCatFlashMTPModel",
        ),
    ),
    (
        "step3p5 step3p7",
        Family("step3.5", _NEXTN, _after_layers, None, 1, None, _V32, "Step3p5MTP"),
    ),
    (
        "bailing_hybrid bailing_moe_v2_5 bailing_hybrid_v3",
        Family("bailing", _NEXTN, _after_layers, None, 0, None, _V32, "BailingMoeV25MTPModel"),
    ),
    ("hy_v3", Family("hy-v3", _NEXTN, _after_layers, draft_class="HYV3MTPModel")),
    (
        "pangu_ultra_moe",
        Family("openpangu", _NEXTN, _after_layers, draft_class="OpenPanguMTPModel"),
    ),
    ("kimi_k3", Family("kimi-k3", _NEXTN, _after_layers, None, 0, None, _V32, "KimiK3MTPModel")),
    ("hy_v4", Family("hy-v4", _NEXTN, _after_layers, None, 0, None, _V32, "HYV4MTPModel")),
    (
        "dots3_note",
        Family("dots3", _NEXTN, _after_layers, default=1, draft_class="Dots3NoteMTPModel"),
    ),
    (
        "glm5_next glm5_next_text",
        Family("glm5-next", _NEXTN, _after_layers, None, 0, None, _V32, "Glm5NextMTPModel"),
    ),
    (
        "minimax_m3 minimax_m3_vl minimax_m3_mtp",
        Family("minimax-m3", ("num_mtp_modules",), _ANY_MTP, None, 0, None, _V32, "MiniMaxM3MTP"),
    ),
    (
        "inkling inkling_mm_model inkling_model",
        Family(
            "inkling",
            ("num_mtp_layers", "mtp_config.num_nextn_predict_layers"),
            _ANY_MTP,
            None,
            0,
            None,
            _V32,
            "InklingMTPModel",
        ),
    ),
)
FAMILIES = {model_type: family for types, family in _KINDS for model_type in types.split()}
"""Families by `model_type`."""

GENERIC = Family(
    "unknown",
    ("mtp_num_hidden_layers", *_NEXTN, "num_mtp_modules"),
    lambda depth, layers: (
        "mtp.",
        "model.mtp.",
        "model.mtp_layers.",
        *_after_layers(depth, layers),
    ),
)
"""For a model type that is in no table: the usual keys, the usual places."""


def announced_depth(family: Family, *configs: Document) -> tuple[int | None, str | None]:
    """(depth, key) that the configs announce; depth None where no key says anything."""
    for config in configs:
        for key in family.keys:
            outer, _, inner = key.rpartition(".")
            value = ((config.get(outer) or {}) if outer else config).get(inner)
            if value is not None:
                return value, key
    return None, None


Status = Literal[
    "none", "ok", "absent", "partial", "dtype_conflict", "declared_quantized", "not_announced"
]


@dataclass(frozen=True)
class MtpReport:
    """What became of the head.

    `announced` is the number of layers the config promises, `present` the number of the head's
    tensors, `complete` whether all that the family owes are there (None where assay does not know
    its layout), `quantized` how its weights are stored, or None for plain ones.
    """

    status: Status
    family: str
    announced: int
    present: int
    complete: bool | None
    quantized: str | None
    key: str | None = None
    by_default: bool = False
    expected: int | None = None
    missing: tuple[str, ...] = ()
    wrong_shape: dict[str, tuple[Shape, Shape]] = field(default_factory=dict)
    conflicts: dict[str, str] = field(default_factory=dict)
    cast: tuple[str, ...] = ()
    """Those of `conflicts` whose tensors an engine finds under the name it looks for, and converts
    without a scale.
    """
    stray_file: str | None = None
    """A weight file with head tensors that the index does not name, so that no engine loads it."""
    checked_since: str | None = None

    def to_json(self) -> dict[str, object]:
        """`results.mtp`."""
        return {
            "announced": self.announced,
            "present": self.present,
            "complete": self.complete,
            "quantized": self.quantized,
            "status": self.status,
            "family": self.family,
            "expected": self.expected,
            "missing": list(self.missing[:50]),
            "key": self.key,
        }


def examine(source: str) -> MtpReport:
    """The head of the checkpoint at a path or `hub:ORG/NAME`, from headers and config alone.

    Raises AssayError if the checkpoint cannot be read.
    """
    checkpoint = open_checkpoint(str(source)).checkpoint
    return examine_checkpoint(checkpoint, parse(checkpoint))


def examine_checkpoint(checkpoint: Checkpoint, declared: Declared | None) -> MtpReport:
    """The head of an opened checkpoint."""
    family = _family(checkpoint)
    depth, key = announced_depth(family, checkpoint.text_config, checkpoint.config)
    by_default = depth is None and family.default > 0
    announced = family.default if depth is None else depth
    if family.forced is not None and (announced or depth is None):
        announced, by_default = family.forced, depth is None
    prefixes = head_prefixes(checkpoint, family, announced)
    present = [name for name in checkpoint.tensors if name.startswith(prefixes)]
    if not announced and any(".layers." in p for p in prefixes) and not _is_head(present):
        present = []  # ordinary layers beyond the configured number, which is another finding
    if by_default and family.forced is not None and not present:
        announced = 0  # forced by the engine, not promised by the config
    if not present:
        status: Status = "absent" if announced else "none"
        return MtpReport(
            status, family.name, announced, 0, False if announced else None, None, key, by_default,
            stray_file=_stray(checkpoint, prefixes), checked_since=family.checked_since,
        )  # fmt: skip
    owed = _owed(checkpoint, family, announced or 1)
    missing = (
        [n for n in owed if not is_stored(checkpoint, n)]
        if owed
        else _unlike(checkpoint, prefixes, present)
    )
    wrong = {
        n: (t.shape, shape)
        for n, shape in owed.items()
        if (t := checkpoint.tensors.get(n)) and t.shape != shape and t.dtype in _UNPACKED
    }
    kinds, conflicts, cast = _storage(checkpoint, prefixes, declared)
    quantized = ", ".join(sorted(k for k in kinds if k is not Kind.PLAIN)) or None
    if missing or wrong:
        status = "partial"
    elif conflicts:
        status = "dtype_conflict"
    elif not announced:
        status = "not_announced"
    else:
        status = "declared_quantized" if quantized else "ok"
    return MtpReport(
        status,
        family.name,
        announced,
        len(present),
        not missing if owed or missing else None,
        quantized,
        key,
        by_default,
        len(owed) or None,
        tuple(missing),
        wrong,
        conflicts,
        cast,
        _stray(checkpoint, prefixes),
        family.checked_since,
    )


_UNPACKED = frozenset({"F32", "F16", "BF16", "F8_E4M3", "I8"})


def head_prefixes(
    checkpoint: Checkpoint, family: Family | None = None, depth: int | None = None
) -> tuple[str, ...]:
    """Beginnings of the head's tensor names; heads that count on after the last layer share the
    backbone's prefix.
    """
    family = family or _family(checkpoint)
    if depth is None:
        depth = (
            announced_depth(family, checkpoint.text_config, checkpoint.config)[0] or family.default
        )
    listed = family.prefixes(depth, checkpoint.dims("num_hidden_layers") or 0)
    return tuple(_placed(checkpoint, prefix) for prefix in listed)


def _placed(checkpoint: Checkpoint, name: str) -> str:
    return (
        checkpoint.prefix + name.removeprefix("model.")
        if name.startswith("model.layers.")
        else name
    )


def _is_head(names: list[str]) -> bool:
    """Whether names show what only a head has: an entry projection or norms of its own, or a place
    of its own.
    """
    marks = (".eh_proj.", ".enorm.", ".hnorm.", ".shared_head.")
    return any("mtp" in name or any(mark in name for mark in marks) for name in names)


def _family(checkpoint: Checkpoint) -> Family:
    if "MiMoForCausalLM" in (
        checkpoint.config.get("architectures") or ()
    ):  # vLLM goes by this name, whatever the type
        return FAMILIES["mimo"]
    types = (checkpoint.model_type, checkpoint.config.get("model_type"))
    return next((FAMILIES[t] for t in types if t in FAMILIES), GENERIC)


def _owed(checkpoint: Checkpoint, family: Family, depth: int) -> dict[str, Shape]:
    """Names and shapes that the family owes; fused experts where the head stores them so."""
    d = Dims(checkpoint.text_config)
    if family.layout is None or depth * max(d.experts, 1) > MAX_PIECES:
        return {}
    prefixes = head_prefixes(checkpoint, family, depth)
    pieces = family.layout(d, depth)
    if any(
        ".experts.gate_up_proj" in name and name.startswith(prefixes) for name in checkpoint.tensors
    ):
        pieces = structure.fused_experts(pieces, d)
    owed = {_placed(checkpoint, name): shape for name, shape in pieces}
    return {} if d.lacking else owed


_PARTS = {
    "attention": re.compile(r"attn|attention|mixer|qkv|[qk]_proj|delta|mamba|ssm"),
    "MLP": re.compile(r"mlp|ffn|expert|feed_forward|moe|mixer|down_proj|\bw[123]\b"),
}
_SHARED = re.compile(r"(self_attn|mlp|input_layernorm|post_attention_layernorm)\b")


def _unlike(checkpoint: Checkpoint, prefixes: tuple[str, ...], present: list[str]) -> list[str]:
    """What a head of unknown layout lacks: a block's attention and MLP, and what all layers of the
    backbone share.
    """
    start = f"{checkpoint.prefix}layers."
    backbone: dict[str, set[str]] = {}
    for module in checkpoint.modules:
        if module.startswith(start) and not (module + ".").startswith(prefixes):
            index, _, tail = module[len(start) :].partition(".")
            backbone.setdefault(index, set()).add(tail)
    shared = (
        {t for t in set.intersection(*backbone.values()) if _SHARED.match(t)} if backbone else set()
    )
    lacking = []
    for prefix in prefixes:
        own = [name.removeprefix(prefix) for name in present if name.startswith(prefix)]
        matrices = [name for name in own if "norm" not in name]
        counted = prefix.startswith(start)
        if counted or own:
            lacking += [
                f"{prefix}* ({part})"
                for part, names in _PARTS.items()
                if not any(map(names.search, matrices))
            ]
        if counted:
            modules = tuple(f".{name.rpartition('.')[0]}" for name in own)
            lacking += [
                prefix + tail
                for tail in sorted(shared)
                if not any(m.endswith(f".{tail}") for m in modules)
            ]
    return lacking


def _storage(
    checkpoint: Checkpoint, prefixes: tuple[str, ...], declared: Declared | None
) -> tuple[Counter[Kind], dict[str, str], tuple[str, ...]]:
    """How the head's weights are stored, where that contradicts the declaration, and where it is
    cast in silence.
    """
    kinds: Counter[Kind] = Counter()
    cast: list[str] = []
    conflicts: dict[str, str] = {}
    for module, kind, _ in weights(checkpoint):
        if not (module + ".").startswith(prefixes):
            continue
        kinds[kind] += 1
        accepted = declared.kinds(module) if declared is not None else PLAIN
        if kind is Kind.FP8_UNSCALED:
            conflicts[module] = "fp8 values without a scale"
            cast.append(module)
        elif (
            accepted is not None
            and kind not in accepted
            and not _engine_forgives(declared, module, kind)
        ):
            conflicts[module] = f"{kind} stored, {' or '.join(sorted(accepted))} declared"
            if kind in _SAME_NAME and accepted & _SAME_NAME:
                cast.append(module)
    return kinds, conflicts, tuple(cast)


# Stored as `weight` with the matrix's own shape, whatever the type: a loader finds such a tensor and converts it.
_SAME_NAME = frozenset({Kind.PLAIN, Kind.FP8, Kind.FP8_UNSCALED, Kind.INT8, Kind.MXFP8})


def _engine_forgives(declared: Declared | None, module: str, kind: Kind) -> bool:
    """ModelOpt leaves `mtp.fc` plain without saying so, and vLLM builds it unquantised for that
    reason.
    """
    return (
        declared is not None
        and declared.method == "modelopt"
        and (declared.algorithm or "").startswith("NVFP4")
        and module == "mtp.fc"
        and kind is Kind.PLAIN
    )


def _stray(checkpoint: Checkpoint, prefixes: tuple[str, ...]) -> str | None:
    for file in sorted(checkpoint.stray):
        header = checkpoint.headers.get(file)
        if header and any(t.name.startswith(prefixes) for t in header.tensors):
            return file
    return None


# What to say about a multi-token-prediction head, and whether vLLM would say it too.

TRACK = "--model-loader-extra-config '{\"enable_weights_track\": true}'"
"""The switch that makes vLLM 0.32 refuse weights that the checkpoint does not fill."""


def loudness(report: MtpReport, quantized_model: bool, version: Version | None) -> str:
    """Whether a vLLM of this version stops on the fault or serves an uninitialised head."""
    if report.status == "dtype_conflict":
        return _conflict_loudness(report, version)
    engine = f"vLLM {version}" if version else "vLLM"
    if report.status not in {"absent", "partial"}:
        return ""
    since = report.checked_since
    if since and report.status == "absent" and version and version < Version.parse(since):
        return f"Whether {engine} says so is not established; {since} stops at load."
    if since and report.status == "absent":
        return (
            f"{engine} stops at load: its {report.family} loader checks that the head's layers"
            " came."
        )
    if since and report.status == "partial":
        return (
            f"{engine} stays silent: its check counts layers, and one loaded tensor satisfies it."
        )
    if not quantized_model:
        return (
            f"{engine} stops at load on an unquantised checkpoint (norm weights are not exempt from"
            " its check), with a message that does not name the head."
        )
    return (
        f"{engine} stays silent: on a quantised checkpoint the head is served uninitialised, at"
        " about 0 % acceptance."
    )


def _conflict_loudness(report: MtpReport, version: Version | None) -> str:
    engine = f"vLLM {version}" if version else "vLLM"
    if len(report.cast) == len(report.conflicts):
        return (
            f"{engine} loads them with one warning: the values are converted without their scale,"
            " and the head drafts nothing that is accepted."
        )
    if version is None or version >= TABLED:
        return f"{engine} stops at load: it finds no parameter of that name in the head."
    return (
        f"Whether {engine} stops is not established: {TABLED} does, older versions skipped such"
        " tensors, in part without a message, and served an uninitialised head."
    )


def check_mtp(
    report: MtpReport, quantized_model: bool, version: Version | None
) -> Iterator[Finding]:
    """Findings for a head that is missing, partial, of the wrong type or unannounced."""
    said = loudness(report, quantized_model, version)
    where = (
        f"{report.key}={report.announced}" if report.key else f"{report.family} has one by default"
    )
    if report.status == "absent":
        title = (
            f"a multi-token-prediction head is announced ({where}), and no tensor of it is stored"
        )
        causes = [
            "the quantiser or save_pretrained dropped it: transformers does not load these tensors",
            "the repository never shipped it",
        ]
        if report.stray_file:
            causes.insert(0, f"it lies in {report.stray_file}, which the index does not name")
        remedies = [
            (
                "serve without --speculative-config, or copy the head's tensors from the original"
                " repository"
            ),
            f"make vLLM say so at load: {TRACK}",
        ]
        references = [
            "https://github.com/vllm-project/vllm/pull/35548",
            "https://github.com/z-lab/paroquant/issues/47",
        ]
        severity = Severity.WARNING if report.by_default else Severity.ERROR
        yield found(
            "mtp_missing", title, severity=severity, detail=said, causes=causes, remedies=remedies,
            references=references, family=report.family, announced=report.announced,
        )  # fmt: skip
    if report.status == "partial":
        yield from _partial(report, said)
    if report.conflicts:
        yield _conflict(report, version)
    elif report.status == "declared_quantized":
        title = f"the multi-token-prediction head is quantised ({report.quantized}), as declared"
        detail = (
            "That works where the engine follows the declaration; acceptance must be measured, not"
            " assumed."
        )
        yield noted("mtp_dtype", title, detail=detail, remedies=["measure it: assay spec LOG"])
    if report.status == "not_announced":
        title = (
            f"{plural(report.present, 'tensor')} of a multi-token-prediction head, but the config"
            " announces none"
        )
        detail = "An engine cannot use the head before the config names its depth."
        yield warned("config_conflict", title, detail=detail, family=report.family)


def _partial(report: MtpReport, said: str) -> Iterator[Finding]:
    if report.missing:
        of = f" of {report.expected}" if report.expected else ""
        title = (
            f"the multi-token-prediction head lacks {plural(len(report.missing), 'tensor')}{of}:"
            f" {some(report.missing)}"
        )
        causes = ["only part of the head was copied into a quantised folder", "a shard is missing"]
        remedies = [
            "copy the missing tensors from the original repository",
            f"make vLLM say so at load: {TRACK}",
        ]
        yield found(
            "mtp_partial",
            title,
            detail=said,
            causes=causes,
            remedies=remedies,
            missing=report.missing[:SHOWN],
            count=len(report.missing),
            expected=report.expected,
        )
    if report.wrong_shape:
        name, (stored, wanted) = next(iter(report.wrong_shape.items()))
        title = f"the head's {name} is {list(stored)}, the config needs {list(wanted)}"
        causes = ["the head belongs to another size of this model"]
        yield found("mtp_partial", title, causes=causes, tensors=report.wrong_shape)


def _conflict(report: MtpReport, version: Version | None) -> Finding:
    module, problem = next(iter(report.conflicts.items()))
    title = (
        f"{plural(len(report.conflicts), 'module')} of the multi-token-prediction head stored"
        f" otherwise than declared, first {module}: {problem}"
    )
    causes = [
        "the head was left in full precision and not put on the ignore list",
        "the head was quantised by a tool that did not write it into the declaration",
    ]
    remedies = [
        (
            "add the head to the ignore list (compressed-tensors `re:.*mtp.*`, GPTQ dynamic"
            " `-:.*mtp.*`)"
        ),
        "or copy the head in full precision from the original repository",
    ]
    references = [
        "https://github.com/vllm-project/vllm/issues/37667",
        "https://github.com/sgl-project/sglang/issues/35797",
    ]
    return found(
        "mtp_dtype",
        title,
        detail=_conflict_loudness(report, version),
        causes=causes,
        remedies=remedies,
        references=references,
        modules=dict(list(report.conflicts.items())[:SHOWN]),
        count=len(report.conflicts),
    )
