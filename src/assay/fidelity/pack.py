"""A reference in one file, that a stranger can check and compare against: `pack:FILE`.

It is a safetensors file of the final states [windows, n, d] in 16 bits and the token ids [windows,
length]; its metadata holds a manifest: how and by what it was scored, the SHA-256 of every tensor
and window, those of the model's files, the floors, what rounding the states to 16 bits cost, and
the digest of the output head. The head itself is in it only where that was asked for. Else it comes
from a checkpoint (`pack:FILE?head=FOLDER`) or from the candidate, and counts only if its digest is
that of the pack.

The manifest carries its own hash, and a signature where a key was given (`signature`): who has the
secret, or the public half of the key, can tell that nobody else changed the pack. Without a key the
hash tells damage only.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.engines.scoring import Head, StateRows, Window
from assay.environment import describe
from assay.errors import AssayError, UsageError
from assay.fidelity.capture import NAME as CAPTURE
from assay.fidelity.capture import Capture, content_digest
from assay.fidelity.signature import Key, claimed_signer, read_key
from assay.fidelity.store import Store, StoreHeader, open_store, stored_settings_of
from assay.options import Options, option
from assay.runs import write_atomically
from assay.verdict import Metric, Report, Verdict

if TYPE_CHECKING:
    import torch


FORMAT, VERSION = "assay-pack", 1
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


# Write a pack.


def write_pack(options: PackOptions) -> Report:
    """Make the pack `options.out` of a store; without `out` check the pack `options.source` and say
    what is in it.
    """
    if options.out is None:
        pack = read_pack(Path(options.source), options.key)
        return _report(
            pack,
            options,
            f"whole{_signed(pack, options.key)}; compare with it as pack:{options.source}",
        )
    key = read_key(options.key)
    store = open_store(Path(options.source.removeprefix("run:")).expanduser())
    tensors, manifest = _content(store, options)
    text = _canonical(manifest)
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "manifest": text,
        "sha256": _sha256(text.encode()),
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
    return _report(pack, options, f"packed; compare with it as pack:{options.out}")


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
        "tensors": {name: _sha256(_bytes(tensor)) for name, tensor in tensors.items()},
        "rounding": {
            "stored": header.dtype,
            "kld_mean": float(cost.mean()),
            "kld_max": float(cost.max()),
        },
        "packed_by": describe(),
    }


def _cost(exact: StateRows, packed: StateRows) -> torch.Tensor:
    """KL of the logits of packed states to those of the stored ones, a token."""
    from assay.fidelity.metrics import window_statistics

    return window_statistics(exact, packed).kl


def head_digest(head: Head) -> str:
    """SHA-256 of an output head as float32, so that a head in 16 bits and the same one widened are
    equal.
    """
    digest = hashlib.sha256(repr(tuple(head.weight.shape)).encode())
    for tensor in (head.weight, head.bias):
        for rows in () if tensor is None else tensor.detach().cpu().split(8192):
            digest.update(_bytes(rows.float()))
    return digest.hexdigest()


def _head_facts(head: Head) -> dict[str, Any]:
    return {
        "sha256": head_digest(head),
        "vocab_size": head.vocab_size,
        "width": int(head.weight.shape[1]),
        "dtype": str(head.weight.dtype).removeprefix("torch."),
        "softcap": head.softcap,
        "scale": head.scale,
    }


def _bytes(tensor: torch.Tensor) -> bytes:
    import torch

    return bytes(tensor.contiguous().view(torch.uint8).numpy().tobytes())


def _sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def _canonical(manifest: Mapping[str, Any]) -> str:
    return json.dumps(manifest, sort_keys=True, separators=(",", ":"), default=dict)


# Read a pack.


@dataclass
class Pack:
    """A pack that was checked: its rows stand for the reference once there is a head (`find_head`)."""

    path: Path
    header: StoreHeader
    windows: tuple[Window, ...]
    manifest: Mapping[str, Any]
    claimed: str
    """Who signed, as the metadata says it: `HMAC-SHA256`, an Ed25519 key, or empty."""
    signer: str
    """Who signed, once a key has verified it; empty before."""
    states: Any
    head: Head | None = None

    @property
    def bytes_per_token(self) -> float:
        """Bytes of the file, without a head in it, for each scored token."""
        states = self.states.numel() * self.states.element_size()
        ids = 4 * len(self.windows) * self.header.length
        return float(states + ids + len(_canonical(self.manifest))) / self.tokens

    @property
    def tokens(self) -> int:
        """Scored tokens."""
        return len(self.windows) * (self.header.length - self.header.scored_from)

    def find_head(self, engine: Any) -> None:
        """Take the candidate's output head where the pack has none; AssayError where it is another."""
        if self.head is None:
            own = getattr(engine, "head", None)
            if not isinstance(own, Head) or not self._is_its(own):
                raise AssayError(
                    f"{self.path.name} holds no output head, and the candidate does not have the"
                    " reference's",
                    finding_id="fidelity.pack_head",
                    remedy=(
                        "name a folder with the reference's output head:"
                        f" pack:{self.path.name}?head=FOLDER"
                    ),
                )
            self.head = self._fitted(own.weight, own.bias)

    def read_head(self, folder: Path) -> None:
        """Take the output head of a checkpoint; AssayError where it has none, or another."""
        for weight, bias in _heads_in(folder):
            head = self._fitted(weight, bias)
            if self._is_its(head):
                self.head = head
                return
        raise AssayError(
            f"{folder} does not hold the output head of {self.path.name}",
            finding_id="fidelity.pack_head",
            remedy=(
                "give the folder of the reference's own checkpoint, or ask for a pack with its head"
                " in it"
            ),
        )

    def rows(self, windows: Sequence[Window]) -> Iterator[StateRows]:
        """States of some of the windows."""
        assert self.head is not None
        place = {window.index: i for i, window in enumerate(self.windows)}
        for window in windows:
            yield StateRows(
                window, self.header.scored_from, self.states[place[window.index]], self.head
            )

    def _is_its(self, head: Head) -> bool:
        """Whether a head is the reference's: a capture names it by the bytes in its own type."""
        facts = self.manifest["head"]
        if not facts.get("content"):
            return head_digest(head) == str(facts["sha256"])
        fitted = self._fitted(head.weight, head.bias)
        return fitted.bias is None and content_digest(fitted.weight) == str(facts["sha256"])

    def _fitted(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Head:
        """A head in the type in which the reference computed, which loses nothing where the digest
        is the same.
        """
        import torch

        facts = self.manifest["head"]
        dtype = getattr(torch, facts["dtype"])
        bias = None if bias is None else bias.to(dtype)
        return Head(weight.to(dtype), bias, softcap=facts["softcap"], scale=facts["scale"])


def read_pack(path: Path, key: Path | None = None) -> Pack:
    """The pack in a file, all of it checked; AssayError in one line where it was altered or the key
    is another.
    """
    from safetensors.torch import load

    given = read_key(key)
    if (path / CAPTURE).is_file():
        return _captured(path, given)
    raw = _read(path)
    metadata = _metadata(raw, path)
    text = metadata.get("manifest", "")
    if metadata.get("format") != FORMAT or metadata.get("version") != str(VERSION):
        raise _altered(path, f"it is no {FORMAT} of version {VERSION}")
    if _sha256(text.encode()) != metadata.get("sha256"):
        raise _altered(path, "its manifest is not the one that was packed")
    if given:
        given.check(path.name, text, metadata)
    try:
        manifest = json.loads(text)
        tensors = load(raw)
        header = StoreHeader(**manifest["header"])
        for name, digest in manifest["tensors"].items():
            if _sha256(_bytes(tensors[name])) != digest:
                raise _altered(path, f"its {name} are not those that were packed")
        windows = tuple(
            Window(entry["index"], tuple(ids))
            for entry, ids in zip(manifest["windows"], tensors["tokens"].tolist(), strict=True)
        )
    except AssayError:
        raise
    except Exception as error:  # whatever safetensors or a strange manifest raises
        raise _altered(path, f"it cannot be read ({type(error).__name__})") from error
    if any(
        w.sha256 != entry["sha256"] for w, entry in zip(windows, manifest["windows"], strict=True)
    ):
        raise _altered(path, "the ids of a window are not its own")
    claimed = claimed_signer(metadata)
    pack = Pack(path, header, windows, manifest, claimed, claimed if key else "", tensors["states"])
    if "head" in tensors:
        head = pack._fitted(tensors["head"], tensors.get("head_bias"))
        if head_digest(head) != manifest["head"]["sha256"]:
            raise _altered(path, "its output head is not the reference's")
        pack.head = head
    return pack


def _captured(folder: Path, key: Key | None) -> Pack:
    """A published capture; it carries no signature of ours."""
    capture = Capture(folder)
    if key:
        key.check(folder.name, "", {})
    pack = Pack(folder, capture.header, capture.windows, capture.manifest, "", "", capture.states)
    if capture.head is not None:
        pack.head = pack._fitted(capture.head, None)
    return pack


def pack_settings(spec: str) -> dict[str, Any]:
    """`windows`, `length`, `scored` and `path` of what `pack:FILE` holds, from its manifest alone."""
    path = pack_path(spec)
    if (path / CAPTURE).is_file():
        capture = Capture(path)
        return stored_settings_of(capture.header, len(capture.windows))
    try:
        manifest = json.loads(_metadata(_read(path), path)["manifest"])
        return stored_settings_of(StoreHeader(**manifest["header"]), len(manifest["windows"]))
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _altered(path, "its manifest cannot be read") from error


def open_pack(spec: str) -> Pack:
    """The pack of `pack:FILE?head=FOLDER&key=FILE`; UsageError for another option."""
    _, _, options = spec.partition("?")
    given = dict(part.partition("=")[::2] for part in options.split("&") if part)
    if unknown := set(given) - {"head", "key"}:
        raise UsageError(
            f"{spec}: unknown option {sorted(unknown)[0]!r}",
            remedy="a pack takes ?head=FOLDER and ?key=FILE",
            finding_id="fidelity.usage",
        )
    pack = read_pack(pack_path(spec), Path(given["key"]) if "key" in given else None)
    if "head" in given:
        pack.read_head(Path(given["head"]).expanduser())
    return pack


def pack_path(spec: str) -> Path:
    """The file of `pack:FILE?…`; UsageError where it names none."""
    name = spec.removeprefix("pack:").partition("?")[0]
    if not name:
        raise UsageError(
            "pack: names no file",
            remedy="write pack:FILE, with the file that assay reference pack wrote",
            finding_id="fidelity.usage",
        )
    return Path(name).expanduser()


def _heads_in(folder: Path) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
    """Output heads that the safetensors files of a checkpoint may hold: of its own, or the
    embedding that it is tied to.
    """
    from safetensors import SafetensorError, safe_open

    for names in (("lm_head", "output"), ("embed_tokens", "wte", "tok_embeddings")):
        for file in sorted(folder.glob("*.safetensors")):
            with suppress(SafetensorError), safe_open(str(file), "pt") as tensors:
                keys = list(tensors.keys())
                for name in (k for k in keys if k.endswith(tuple(f"{n}.weight" for n in names))):
                    bias = f"{name.removesuffix('weight')}bias"
                    yield (
                        tensors.get_tensor(name),
                        tensors.get_tensor(bias) if bias in keys else None,
                    )


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise AssayError(
            f"cannot read the pack {path}: {error.strerror}",
            finding_id="fidelity.pack_unreadable",
            remedy="give the file that assay reference pack wrote",
        ) from error


def _metadata(raw: bytes, path: Path) -> dict[str, str]:
    """The metadata of a safetensors file."""
    try:
        (size,) = struct.unpack("<Q", raw[:8])
        found: dict[str, str] = json.loads(raw[8 : 8 + size])["__metadata__"]
        return dict(found)
    except (struct.error, ValueError, KeyError, TypeError, RecursionError, AttributeError) as error:
        raise _altered(path, "it is no pack, or cut short") from error


def _altered(path: Path, reason: str) -> AssayError:
    return AssayError(
        f"the pack {path.name} is damaged or altered: {reason}",
        finding_id="fidelity.pack_altered",
        remedy="fetch it again, or make it again: assay reference pack DIR --out FILE",
    )


def _signed(pack: Pack, key: Path | None) -> str:
    if key:
        return " and signed with this key"
    if pack.claimed:
        return ", with a signature that was not checked (give --key to check it)"
    return ", not signed"


def _report(pack: Pack, options: PackOptions, summary: str) -> Report:
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
