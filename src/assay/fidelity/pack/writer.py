"""Write a pack from a stored reference."""

from __future__ import annotations

from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.engines.scoring import Head, StateRows
from assay.environment import describe
from assay.errors import AssayError
from assay.fidelity.signature import read_key
from assay.fidelity.store.reader import Store, open_store
from assay.options import Options, option
from assay.runs import write_atomically
from assay.verdict import Metric, Report, Verdict

if TYPE_CHECKING:
    import torch
from assay.fidelity.pack.format import FORMAT, VERSION, bytes_of, canonical, head_digest, sha256_of
from assay.fidelity.pack.reader import Pack, read_pack

_SAMPLE = 4
"""Windows on which the cost of rounding the states is measured."""


@dataclass(frozen=True)
class PackOptions(Options):
    """A stored reference as one file, or such a file that is checked."""

    VERB, AREA = "reference pack", "fidelity"

    source: str
    _: KW_ONLY
    out: Path | None = option(
        None, "File to write; without it the argument is a pack, which is checked."
    )
    head: bool = option(
        False, "Put the output head itself into the pack, and not its digest alone."
    )
    dtype: str = option(
        "engine",
        "Type of the states; engine: as stored, float32 as float16.",
        choices=("engine", "bfloat16", "float16"),
    )
    key: Path | None = option(
        None,
        "File with a secret or an Ed25519 key (PEM, OpenSSH): sign the pack, or check who signed.",
        apart=True,
    )


def write_pack(options: PackOptions) -> Report:
    """Make the pack `options.out` of a store; without `out` check the pack `options.source` and say
    what is in it.
    """
    if options.out is None:
        pack = read_pack(Path(options.source), options.key)
        return pack_report(
            pack,
            options,
            f"whole{_signed(pack, options.key)}; compare with it as pack:{options.source}",
        )
    key = read_key(options.key)
    store = open_store(Path(options.source.removeprefix("run:")).expanduser())
    tensors, manifest = _content(store, options)
    text = canonical(manifest)
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "manifest": text,
        "sha256": sha256_of(text.encode()),
    }
    if key:
        metadata |= key.sign(text)
    from safetensors.torch import save

    try:
        write_atomically(options.out, save(tensors, metadata))
    except OSError as error:
        raise AssayError(
            f"cannot write {options.out}: {error.strerror}",
            finding_id="fidelity.store_unwritable",
            remedy="make room, or give another file with --out",
        ) from error
    pack = read_pack(options.out, options.key)
    return pack_report(pack, options, f"packed; compare with it as pack:{options.out}")


def _content(store: Store, options: PackOptions) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and manifest of the pack of a store; AssayError where the states do not fit into the
    type.
    """
    import torch

    header, head = store.header, store.head
    dtype = options.dtype
    if dtype == "engine":
        dtype = "float16" if header.dtype == "float32" else header.dtype
    wanted = getattr(torch, dtype)
    parts: list[torch.Tensor] = []
    costs: list[torch.Tensor] = []
    for rows in store.rows(store.windows):
        packed = rows.states.to(wanted)
        if not packed.isfinite().all() and rows.states.isfinite().all():
            raise AssayError(
                f"window {rows.window.index}: its states do not fit into {dtype}",
                finding_id="fidelity.pack_overflow",
                remedy="pack them with --dtype bfloat16",
            )
        if len(parts) < _SAMPLE:
            costs.append(_cost(rows, StateRows(rows.window, rows.first, packed, head)))
        parts.append(packed)
    cost = torch.cat(costs)
    tensors = {
        "states": torch.stack(parts),
        "tokens": torch.tensor([w.tokens for w in store.windows], dtype=torch.int32),
    }
    if options.head:
        tensors["head"] = head.weight.detach().cpu().contiguous()
        if head.bias is not None:
            tensors["head_bias"] = head.bias.detach().cpu().contiguous()
    return tensors, {
        "header": {**asdict(header), "dtype": dtype},
        "head": _head_facts(head),
        "windows": [{"index": w.index, "sha256": w.sha256} for w in store.windows],
        "tensors": {name: sha256_of(bytes_of(tensor)) for name, tensor in tensors.items()},
        "rounding": {
            "stored": header.dtype,
            "kld_mean": float(cost.mean()),
            "kld_max": float(cost.max()),
        },
        "packed_by": describe(),
    }


def _cost(exact: StateRows, packed: StateRows) -> torch.Tensor:
    """KL of the logits of packed states to those of the stored ones, a token."""
    from assay.fidelity.metrics.token_statistics import window_statistics

    return window_statistics(exact, packed).kl


def _head_facts(head: Head) -> dict[str, Any]:
    return {
        "sha256": head_digest(head),
        "vocab_size": head.vocab_size,
        "width": int(head.weight.shape[1]),
        "dtype": str(head.weight.dtype).removeprefix("torch."),
        "softcap": head.softcap,
        "scale": head.scale,
    }


def _signed(pack: Pack, key: Path | None) -> str:
    if key:
        return " and signed with this key"
    if pack.claimed:
        return ", with a signature that was not checked (give --key to check it)"
    return ", not signed"


def pack_report(pack: Pack, options: PackOptions, summary: str) -> Report:
    """The report of a pack that was written or checked."""
    size, rounding = pack.path.stat().st_size, pack.manifest["rounding"]
    header = pack.header
    results = {
        "windows": len(pack.windows),
        "tokens": pack.tokens,
        "bytes": size,
        "bytes_per_token": pack.bytes_per_token,
        "dtype": header.dtype,
        "rounding": rounding,
        "head": {**pack.manifest["head"], "included": pack.head is not None},
        "signed": bool(pack.claimed),
        "signature_checked": bool(pack.signer),
        "signer": pack.signer or None,
        "text": dict(header.text),
        "engine": dict(header.engine),
        "model_sha256": header.environment.get("model_sha256", {}),
        "floors": header.environment.get("floors"),
    }
    return Report(
        command="reference pack",
        verdict=Verdict.PASS,
        subject={"source": options.source, "out": str(options.out) if options.out else None},
        results=results,
        environment=describe(),
        headline=[
            Metric("packed", f"{pack.tokens:,} tokens in {len(pack.windows)} windows"),
            Metric("states and ids", f"{header.dtype}, {pack.bytes_per_token:,.0f} bytes a token"),
            Metric(
                "cost of rounding",
                f"KL {rounding['kld_mean']:.2g} nats, at most {rounding['kld_max']:.2g}",
            ),
            Metric(
                "output head",
                "in the pack" if pack.head else f"by digest {results['head']['sha256'][:12]}…",
            ),
            Metric("signature", pack.signer or ("not checked" if pack.claimed else "none")),
        ],
        summary=summary,
    )
