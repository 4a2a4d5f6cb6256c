"""The findings on a multi-token-prediction head, and whether vLLM would say it too."""

from __future__ import annotations

from collections.abc import Iterator

from assay.checkpoint.findings import SHOWN, found, noted, plural, some, warned
from assay.checkpoint.flags.versions import TABLED, Version
from assay.checkpoint.mtp import MtpReport
from assay.verdict import Finding, Severity

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
            "mtp_missing",
            title,
            severity=severity,
            detail=said,
            causes=causes,
            remedies=remedies,
            references=references,
            family=report.family,
            announced=report.announced,
        )
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
