"""Is the multi-token-prediction head there, whole, and stored as the checkpoint declares?"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from assay.checkpoint import expected
from assay.checkpoint.expected import Dims, Piece, with_fused_experts
from assay.checkpoint.findings import SHOWN, found, noted, plural, some, warned
from assay.checkpoint.quantization.check import weights
from assay.checkpoint.quantization.declared import Declared, Kind
from assay.checkpoint.quantization.schemes import parse
from assay.checkpoint.serve_args import TABLED, Version
from assay.checkpoint.structure import is_stored
from assay.checkpoint.subject import Checkpoint
from assay.verdict import Finding, Severity

# -----------------------------------------------------------------------------
# Who announces a multi-token-prediction head, where, and which tensors it then owes.
#
# One `Family` per layout. `tensors` gives names and shapes for one head of `depth` layers; families whose inner layout
# differs from config to config give only `prefix`, and their head is then judged by presence.

Layout = Callable[[Dims, int], Iterator[Piece]]
"""(dimensions, depth) to (full tensor name, shape)."""


@dataclass(frozen=True)
class Family:
    """One way to ship a head.

    `keys` announce its depth, at the top level or in the text config; `default` holds where no key is given.
    `prefixes(depth, layers)` are the beginnings of its tensor names. `checked_since` is the vLLM version from which
    the loader refuses a missing head for this family, None where no version does.
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


_PRE_POST = ("input_layernorm", "post_attention_layernorm")


def _qwen_head(d: Dims, depth: int, moe: bool) -> Iterator[Piece]:
    """Qwen3.5 and Qwen3-Next: fc over embedding and hidden state, then full-attention layers. Dense: 15 tensors."""
    yield from expected.linear("mtp.fc", d.hidden, 2 * d.hidden)
    yield from _below("mtp", expected.norms(d, "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"))
    for i in range(depth):
        at = f"mtp.layers.{i}"
        yield from _below(at, expected.attention(d, qk_norm="head", gated=True))
        if moe:
            yield from _below(at, expected.shared_expert_moe(d))
        else:
            yield from _below(at, expected.gated_mlp(d, d.int_or("intermediate_size")))
        yield from _below(at, expected.norms(d, *_PRE_POST))


def qwen_dense(d: Dims, depth: int) -> Iterator[Piece]:
    """Qwen3.5 dense."""
    return _qwen_head(d, depth, moe=False)


def qwen_moe(d: Dims, depth: int) -> Iterator[Piece]:
    """Qwen3-Next and Qwen3.5 MoE."""
    return _qwen_head(d, depth, moe=bool(d.int_or("num_experts")))


def _glue(d: Dims, at: str) -> Iterator[Piece]:
    yield from _below(at, expected.norms(d, "enorm", "hnorm", "shared_head.norm"))
    yield from expected.linear(f"{at}.eh_proj", d.hidden, 2 * d.hidden)


def deepseek(d: Dims, depth: int) -> Iterator[Piece]:
    """DeepSeek V3: a whole MoE layer after the last, with its own norms and entry projection."""
    for i in range(depth):
        at = f"model.layers.{d.layers + i}"
        yield from _glue(d, at)
        yield from _below(at, expected.latent_attention(d))
        yield from _below(at, expected.grouped_moe(d))
        yield from _below(at, expected.norms(d, *_PRE_POST))


def glm(d: Dims, depth: int) -> Iterator[Piece]:
    """GLM-4.5: DeepSeek's layout around grouped-query attention."""
    qk_norm = "head" if d.flag("use_qk_norm") else ""
    for i in range(depth):
        at = f"model.layers.{d.layers + i}"
        yield from _glue(d, at)
        yield from _below(at, expected.attention(d, qkv_bias=d.flag("attention_bias"), qk_norm=qk_norm))
        yield from _below(at, expected.grouped_moe(d))
        yield from _below(at, expected.norms(d, *_PRE_POST))


def mimo(d: Dims, depth: int) -> Iterator[Piece]:
    """MiMo-7B: Qwen2 layers below model.mtp_layers."""
    for i in range(depth):
        at = f"model.mtp_layers.{i}"
        yield from _below(at, expected.norms(d, "token_layernorm", "hidden_layernorm", "final_layernorm"))
        yield from expected.linear(f"{at}.input_proj", d.hidden, 2 * d.hidden)
        yield from _below(at, expected.attention(d, qkv_bias=True))
        yield from _below(at, expected.gated_mlp(d, d.int_or("intermediate_size")))
        yield from _below(at, expected.norms(d, *_PRE_POST))


def ernie(d: Dims, depth: int) -> Iterator[Piece]:
    """ERNIE-4.5-MoE: a dense Llama block; glue in modules of its own."""
    for i in range(depth):
        yield from expected.norms(d, f"model.mtp_emb_norm.{i}", f"model.mtp_hidden_norm.{i}")
        yield from expected.linear(f"model.mtp_linear_proj.{i}", d.hidden, 2 * d.hidden)
        at = f"model.mtp_block.{i}"
        yield from _below(at, expected.attention(d))
        yield from _below(at, expected.gated_mlp(d, d.int_or("intermediate_size")))
        yield from _below(at, expected.norms(d, *_PRE_POST))


_QWEN35 = Family("qwen3.5", ("mtp_num_hidden_layers",), _under("mtp."), qwen_dense, draft_class="Qwen3_5MTP")
_QWEN35_MOE = Family(
    "qwen3.5-moe", ("mtp_num_hidden_layers",), _under("mtp."), qwen_moe, draft_class="Qwen3_5MoeMTP"
)
_DEEPSEEK = Family(
    "deepseek-v3", _NEXTN, _after_layers, deepseek, checked_since="0.32.0", draft_class="DeepSeekMTPModel"
)
_STEP = Family("step3.5", _NEXTN, _after_layers, checked_since="0.32.0", default=1, draft_class="Step3p5MTP")
_BAILING = Family(
    "bailing", _NEXTN, _after_layers, checked_since="0.32.0", draft_class="BailingMoeV25MTPModel"
)
_MIMO_V2 = Family("mimo-v2", _NEXTN, _under("model.mtp."), forced=1, draft_class="MiMoV2MTPModel")
_NEMOTRON = Family(
    "nemotron-h", _NEXTN, _under("mtp.", "language_model.mtp."), draft_class="NemotronHMTPModel"
)
_EXAONE = Family("exaone", _NEXTN, _under("mtp."), default=1, draft_class="ExaoneMoeMTP")

_QWEN4 = Family("qwen4-exp", ("mtp_num_hidden_layers", *_NEXTN), _under("mtp."), draft_class="Qwen4ExpMTP")
_DEEPSEEK_V4 = Family(
    "deepseek-v4", _NEXTN, _under("mtp."), checked_since="0.32.0", draft_class="DeepSeekV4MTPModel"
)
_GLM5_NEXT = Family(
    "glm5-next", _NEXTN, _after_layers, checked_since="0.32.0", draft_class="Glm5NextMTPModel"
)
_MINIMAX = Family(
    "minimax-m3", ("num_mtp_modules",), _under("mtp.", "model.mtp."), checked_since="0.32.0",
    draft_class="MiniMaxM3MTP",
)  # fmt: skip
_INKLING = Family(
    "inkling", ("num_mtp_layers", "mtp_config.num_nextn_predict_layers"), _under("mtp.", "model.mtp."),
    checked_since="0.32.0", draft_class="InklingMTPModel",
)  # fmt: skip

FAMILIES: dict[str, Family] = {
    "qwen3_5": _QWEN35, "qwen3_5_text": _QWEN35, "qwen3_5_moe": _QWEN35_MOE, "qwen3_5_moe_text": _QWEN35_MOE,
    "intern_s2_preview": _QWEN35, "interns2_mobius": Family(
        "intern-s2-mobius", ("mtp_num_hidden_layers",), _under("mtp."), draft_class="InternS2MobiusMTP"
    ),
    "qwen3_next": Family("qwen3-next", _NEXTN, _under("mtp."), qwen_moe, default=1, draft_class="Qwen3NextMTP"),
    "qwen4_exp": _QWEN4, "qwen4_exp_text": _QWEN4,
    "deepseek_v3": _DEEPSEEK,
    "deepseek_v32": Family(
        "deepseek-v3.2", _NEXTN, _after_layers, checked_since="0.32.0", draft_class="DeepseekV32MTPModel"
    ),
    "glm_moe_dsa": Family(
        "glm-moe-dsa", _NEXTN, _after_layers, checked_since="0.32.0", draft_class="DeepseekV32MTPModel"
    ),
    "deepseek_v4": _DEEPSEEK_V4, "deepseek_v41": _DEEPSEEK_V4,
    "glm4_moe": Family("glm-4.5", _NEXTN, _after_layers, glm, draft_class="Glm4MoeMTPModel"),
    "glm4_moe_lite": Family("glm-4-lite", _NEXTN, _after_layers, draft_class="Glm4MoeLiteMTPModel"),
    "glm_ocr": Family("glm-ocr", _NEXTN, _after_layers, draft_class="GlmOcrMTPModel"),
    "mimo": Family("mimo", _NEXTN, _under("model.mtp_layers."), mimo, draft_class="MiMoMTPModel"),
    "mimo_v2": _MIMO_V2, "mimo_v2_flash": _MIMO_V2,
    "ernie4_5_moe": Family(
        "ernie-4.5", _NEXTN,
        _under("model.mtp_emb_norm.", "model.mtp_hidden_norm.", "model.mtp_linear_proj.", "model.mtp_block."),
        ernie, draft_class="ErnieMTPModel",
    ),
    "nemotron_h": _NEMOTRON, "nemotron_h_puzzle": _NEMOTRON,
    "exaone_moe": _EXAONE, "exaone4_5": _EXAONE,
    "longcat_flash": Family(
        "longcat-flash", _NEXTN, _under("model.mtp."), default=1, draft_class="LongCatFlashMTPModel"
    ),
    "step3p5": _STEP, "step3p7": _STEP,
    "bailing_hybrid": _BAILING, "bailing_moe_v2_5": _BAILING, "bailing_hybrid_v3": _BAILING,
    "hy_v3": Family("hy-v3", _NEXTN, _after_layers, draft_class="HYV3MTPModel"),
    "pangu_ultra_moe": Family("openpangu", _NEXTN, _after_layers, draft_class="OpenPanguMTPModel"),
    "kimi_k3": Family("kimi-k3", _NEXTN, _after_layers, checked_since="0.32.0", draft_class="KimiK3MTPModel"),
    "hy_v4": Family("hy-v4", _NEXTN, _after_layers, checked_since="0.32.0", draft_class="HYV4MTPModel"),
    "dots3_note": Family("dots3", _NEXTN, _after_layers, default=1, draft_class="Dots3NoteMTPModel"),
    "glm5_next": _GLM5_NEXT, "glm5_next_text": _GLM5_NEXT,
    "minimax_m3": _MINIMAX, "minimax_m3_vl": _MINIMAX, "minimax_m3_mtp": _MINIMAX,
    "inkling": _INKLING, "inkling_mm_model": _INKLING, "inkling_model": _INKLING,
}  # fmt: skip
"""Families by `model_type`."""

GENERIC = Family(
    "unknown", ("mtp_num_hidden_layers", *_NEXTN, "num_mtp_modules"),
    lambda depth, layers: ("mtp.", "model.mtp.", "model.mtp_layers.", *_after_layers(depth, layers)),
)  # fmt: skip
"""For a model type that is in no table: the usual keys, the usual places."""


def announced_depth(family: Family, *configs: dict[str, Any]) -> tuple[int | None, str | None]:
    """(depth, key) that the configs announce; depth None where no key says anything."""
    for config in configs:
        for key in family.keys:
            value: Any = config
            for part in key.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if type(value) is int and value >= 0:
                return value, key
    return None, None


# -----------------------------------------------------------------------------

Status = Literal["none", "ok", "absent", "partial", "dtype_conflict", "declared_quantized", "not_announced"]


@dataclass(frozen=True)
class MtpReport:
    """What became of the head.

    `announced` is the number of layers the config promises, `present` the number of the head's tensors, `complete`
    whether all that the family owes are there (None where assay does not know its layout), `quantized` how its weights
    are stored, or None for plain ones.
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
    wrong_shape: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = field(default_factory=dict)
    conflicts: dict[str, str] = field(default_factory=dict)
    cast: tuple[str, ...] = ()
    """Those of `conflicts` whose tensors an engine finds under the name it looks for, and converts without a scale."""
    stray_file: str | None = None
    """A weight file with head tensors that the index does not name, so that no engine loads it."""
    checked_since: str | None = None

    def to_json(self) -> dict[str, object]:
        """`results.mtp`."""
        return {
            "announced": self.announced, "present": self.present, "complete": self.complete,
            "quantized": self.quantized, "status": self.status, "family": self.family, "expected": self.expected,
            "missing": list(self.missing[:50]), "key": self.key,
        }  # fmt: skip


def examine(source: str | Path) -> MtpReport:
    """The head of the checkpoint at a path or `hub:ORG/NAME`, from headers and config alone.

    Raises AssayError if the checkpoint cannot be read.
    """
    from assay.checkpoint.open import open_checkpoint

    checkpoint = open_checkpoint(str(source)).checkpoint
    return examine_checkpoint(checkpoint, parse(checkpoint))


def examine_checkpoint(checkpoint: Checkpoint, declared: Declared | None) -> MtpReport:
    """The head of an opened checkpoint."""
    config = checkpoint.text_config
    family = _family(checkpoint)
    depth, key = announced_depth(family, config, checkpoint.config)
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
    stray = _stray(checkpoint, prefixes)
    if not present:
        status: Status = "absent" if announced else "none"
        return MtpReport(
            status, family.name, announced, 0, False if announced else None, None, key, by_default,
            stray_file=stray, checked_since=family.checked_since,
        )  # fmt: skip
    owed = _owed(checkpoint, family, announced or 1)
    missing = tuple(n for n in owed if not is_stored(checkpoint, n))
    wrong = {
        n: (t.shape, shape)
        for n, shape in owed.items()
        if (t := checkpoint.tensors.get(n))
        and t.shape != shape
        and t.dtype in {"F32", "F16", "BF16", "F8_E4M3", "I8"}
    }
    kinds, conflicts, cast = _storage(checkpoint, prefixes, declared)
    quantized = ", ".join(sorted(k for k in kinds if k is not Kind.PLAIN)) or None
    return MtpReport(
        _status(announced, bool(missing or wrong), bool(conflicts), quantized),
        family.name, announced, len(present), not missing if owed else None, quantized, key, by_default,
        len(owed) or None, missing, wrong, conflicts, cast, stray, family.checked_since,
    )  # fmt: skip


def head_prefixes(
    checkpoint: Checkpoint, family: Family | None = None, depth: int | None = None
) -> tuple[str, ...]:
    """Beginnings of the head's tensor names; heads that count on after the last layer share the backbone's prefix."""
    family = family or _family(checkpoint)
    if depth is None:
        depth = announced_depth(family, checkpoint.text_config, checkpoint.config)[0] or family.default
    listed = family.prefixes(depth, checkpoint.dims("num_hidden_layers") or 0)
    return tuple(_placed(checkpoint, prefix) for prefix in listed)


def _placed(checkpoint: Checkpoint, name: str) -> str:
    return checkpoint.prefix + name.removeprefix("model.") if name.startswith("model.layers.") else name


def _is_head(names: list[str]) -> bool:
    """Whether names show what only a head has: an entry projection or norms of its own, or a place of its own."""
    marks = (".eh_proj.", ".enorm.", ".hnorm.", ".shared_head.")
    return any("mtp" in name or any(mark in name for mark in marks) for name in names)


def _status(announced: int, partial: bool, conflict: bool, quantized: str | None) -> Status:
    if partial:
        return "partial"
    if conflict:
        return "dtype_conflict"
    if not announced:
        return "not_announced"
    return "declared_quantized" if quantized else "ok"


def _family(checkpoint: Checkpoint) -> Family:
    for config in (checkpoint.text_config, checkpoint.config):
        family = FAMILIES.get(str(config.get("model_type")))
        if family is not None:
            return family
    return GENERIC


def _owed(checkpoint: Checkpoint, family: Family, depth: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes that the family owes; fused experts where the head stores them so."""
    d = Dims(checkpoint.text_config)
    if family.layout is None or not d.hidden:
        return {}
    pieces = ((_placed(checkpoint, name), shape) for name, shape in family.layout(d, depth))
    prefixes = head_prefixes(checkpoint, family, depth)
    fused = any(".experts.gate_up_proj" in name and name.startswith(prefixes) for name in checkpoint.tensors)
    if fused:
        count = d.int_or("n_routed_experts") or d.int_or("num_experts")
        return dict(_fuse(pieces, d, count))
    return dict(pieces)


def _fuse(
    pieces: Iterator[tuple[str, tuple[int, ...]]], d: Dims, count: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Like `with_fused_experts`, below each head layer's own prefix."""
    for name, shape in pieces:
        head, marker, rest = name.partition("mlp.experts.")
        if not marker:
            yield name, shape
        elif rest.startswith("0.gate_proj."):
            width = d.int_or("moe_intermediate_size")
            inner = with_fused_experts(iter([("mlp.experts.0.gate_proj.weight", shape)]), d, count, width)
            yield from ((head + fused, fused_shape) for fused, fused_shape in inner)


def _storage(
    checkpoint: Checkpoint, prefixes: tuple[str, ...], declared: Declared | None
) -> tuple[Counter[Kind], dict[str, str], tuple[str, ...]]:
    """How the head's weights are stored, where that contradicts the declaration, and where it is cast in silence."""
    kinds: Counter[Kind] = Counter()
    cast: list[str] = []
    conflicts: dict[str, str] = {}
    for module, kind, _ in weights(checkpoint):
        if not (module + ".").startswith(prefixes):
            continue
        kinds[kind] += 1
        accepted = declared.accepts(module) if declared is not None else frozenset({Kind.PLAIN})
        if kind is Kind.FP8_UNSCALED:
            conflicts[module] = "fp8 values without a scale"
            cast.append(module)
        elif accepted is not None and kind not in accepted and not _engine_forgives(declared, module, kind):
            conflicts[module] = f"{kind} stored, {' or '.join(sorted(accepted))} declared"
            if kind in _SAME_NAME and accepted & _SAME_NAME:
                cast.append(module)
    return kinds, conflicts, tuple(cast)


# Stored as `weight` with the matrix's own shape, whatever the type: a loader finds such a tensor and converts it.
_SAME_NAME = frozenset({Kind.PLAIN, Kind.FP8, Kind.FP8_UNSCALED, Kind.INT8, Kind.MXFP8})


def _engine_forgives(declared: Declared | None, module: str, kind: Kind) -> bool:
    """ModelOpt leaves `mtp.fc` plain without saying so, and vLLM builds it unquantised for that reason."""
    return (
        declared is not None and declared.method == "modelopt" and (declared.algorithm or "").startswith("NVFP4")
        and module == "mtp.fc" and kind is Kind.PLAIN
    )  # fmt: skip


def _stray(checkpoint: Checkpoint, prefixes: tuple[str, ...]) -> str | None:
    for file in sorted(checkpoint.stray):
        header = checkpoint.headers.get(file)
        if header and any(t.name.startswith(prefixes) for t in header.tensors):
            return file
    return None


# -----------------------------------------------------------------------------
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
        return f"{engine} stops at load: its {report.family} loader checks that the head's layers came."
    if since and report.status == "partial":
        return f"{engine} stays silent: its check counts layers, and one loaded tensor satisfies it."
    if not quantized_model:
        return (
            f"{engine} stops at load on an unquantised checkpoint (norm weights are not exempt from its check), "
            "with a message that does not name the head."
        )
    return f"{engine} stays silent: on a quantised checkpoint the head is served uninitialised, at about 0 % acceptance."


def _conflict_loudness(report: MtpReport, version: Version | None) -> str:
    engine = f"vLLM {version}" if version else "vLLM"
    if len(report.cast) == len(report.conflicts):
        return (
            f"{engine} loads them with one warning: the values are converted without their scale, and the head drafts "
            "nothing that is accepted."
        )
    if version is None or version >= TABLED:
        return f"{engine} stops at load: it finds no parameter of that name in the head."
    return (
        f"Whether {engine} stops is not established: {TABLED} does, older versions skipped such tensors, in part "
        "without a message, and served an uninitialised head."
    )


def check_mtp(report: MtpReport, quantized_model: bool, version: Version | None) -> Iterator[Finding]:
    """Findings for a head that is missing, partial, of the wrong type or unannounced."""
    said = loudness(report, quantized_model, version)
    where = f"{report.key}={report.announced}" if report.key else f"{report.family} has one by default"
    if report.status == "absent":
        title = f"a multi-token-prediction head is announced ({where}), and no tensor of it is stored"
        causes = [
            "the quantiser or save_pretrained dropped it: transformers does not load these tensors",
            "the repository never shipped it",
        ]
        if report.stray_file:
            causes.insert(0, f"it lies in {report.stray_file}, which the index does not name")
        remedies = [
            "serve without --speculative-config, or copy the head's tensors from the original repository",
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
            "That works where the engine follows the declaration; acceptance must be measured, not assumed."
        )
        yield noted("mtp_dtype", title, detail=detail, remedies=["measure it: assay spec LOG"])
    if report.status == "not_announced":
        title = f"{plural(report.present, 'tensor')} of a multi-token-prediction head, but the config announces none"
        detail = "An engine cannot use the head before the config names its depth."
        yield warned("config_conflict", title, detail=detail, family=report.family)


def _partial(report: MtpReport, said: str) -> Iterator[Finding]:
    if report.missing:
        title = (
            f"the multi-token-prediction head lacks {plural(len(report.missing), 'tensor')} of {report.expected}: "
            f"{some(report.missing)}"
        )
        causes = ["only part of the head was copied into a quantised folder", "a shard is missing"]
        remedies = [
            "copy the missing tensors from the original repository",
            f"make vLLM say so at load: {TRACK}",
        ]
        yield found(
            "mtp_partial", title, detail=said, causes=causes, remedies=remedies, missing=report.missing[:SHOWN],
            count=len(report.missing), expected=report.expected,
        )  # fmt: skip
    if report.wrong_shape:
        name, (stored, wanted) = next(iter(report.wrong_shape.items()))
        title = f"the head's {name} is {list(stored)}, the config needs {list(wanted)}"
        causes = ["the head belongs to another size of this model"]
        yield found("mtp_partial", title, causes=causes, tensors=report.wrong_shape)


def _conflict(report: MtpReport, version: Version | None) -> Finding:
    module, problem = next(iter(report.conflicts.items()))
    title = (
        f"{plural(len(report.conflicts), 'module')} of the multi-token-prediction head stored otherwise than declared, "
        f"first {module}: {problem}"
    )
    causes = [
        "the head was left in full precision and not put on the ignore list",
        "the head was quantised by a tool that did not write it into the declaration",
    ]
    remedies = [
        "add the head to the ignore list (compressed-tensors `re:.*mtp.*`, GPTQ dynamic `-:.*mtp.*`)",
        "or copy the head in full precision from the original repository",
    ]
    references = [
        "https://github.com/vllm-project/vllm/issues/37667", "https://github.com/sgl-project/sglang/issues/35797",
    ]  # fmt: skip
    return found(
        "mtp_dtype", title, detail=_conflict_loudness(report, version), causes=causes, remedies=remedies, references=references,
        modules=dict(list(report.conflicts.items())[:SHOWN]), count=len(report.conflicts),
    )  # fmt: skip
