"""Read a pack, with its hashes and its signature checked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from assay.engines.scoring import Head, StateRows, Window
from assay.errors import AssayError, UsageError
from assay.fidelity.capture import NAME as CAPTURE
from assay.fidelity.capture import Capture, content_digest
from assay.fidelity.signature import Key, claimed_signer, read_key
from assay.fidelity.store.manifest import StoreHeader
from assay.fidelity.store.settings import stored_settings_of

if TYPE_CHECKING:
    import torch
from assay.fidelity.pack.format import (
    FORMAT,
    VERSION,
    altered,
    bytes_of,
    canonical,
    head_digest,
    read_metadata,
    sha256_of,
)
from assay.files import read_bounded

MOST_BYTES = 64 << 30
"""The longest pack that is read."""


@dataclass
class Pack:
    """A pack that was checked: its rows stand for the reference once there is a head
    (`find_head`).
    """

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
        return float(states + ids + len(canonical(self.manifest))) / self.tokens

    @property
    def tokens(self) -> int:
        """Scored tokens."""
        return len(self.windows) * (self.header.length - self.header.scored_from)

    def find_head(self, engine: Any) -> None:
        """Take the candidate's output head where the pack has none; AssayError where it is
        another.
        """
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
    metadata = read_metadata(raw, path)
    text = metadata.get("manifest", "")
    if metadata.get("format") != FORMAT or metadata.get("version") != str(VERSION):
        raise altered(path, f"it is no {FORMAT} of version {VERSION}")
    if sha256_of(text.encode()) != metadata.get("sha256"):
        raise altered(path, "its manifest is not the one that was packed")
    if given:
        given.check(path.name, text, metadata)
    try:
        manifest = json.loads(text)
        tensors = load(raw)
        header = StoreHeader(**manifest["header"])
        for name, digest in manifest["tensors"].items():
            if sha256_of(bytes_of(tensors[name])) != digest:
                raise altered(path, f"its {name} are not those that were packed")
        windows = tuple(
            Window(entry["index"], tuple(ids))
            for entry, ids in zip(manifest["windows"], tensors["tokens"].tolist(), strict=True)
        )
    except AssayError:
        raise
    except Exception as error:  # safetensors, or a strange manifest
        raise altered(path, f"it cannot be read ({type(error).__name__})") from error
    if any(
        w.sha256 != entry["sha256"] for w, entry in zip(windows, manifest["windows"], strict=True)
    ):
        raise altered(path, "the ids of a window are not its own")
    claimed = claimed_signer(metadata)
    pack = Pack(path, header, windows, manifest, claimed, claimed if key else "", tensors["states"])
    if "head" in tensors:
        head = pack._fitted(tensors["head"], tensors.get("head_bias"))
        if head_digest(head) != manifest["head"]["sha256"]:
            raise altered(path, "its output head is not the reference's")
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
    """`windows`, `length`, `scored` and `path` of what `pack:FILE` holds, from its
    manifest alone.
    """
    path = pack_path(spec)
    if (path / CAPTURE).is_file():
        capture = Capture(path)
        return stored_settings_of(capture.header, len(capture.windows))
    try:
        manifest = json.loads(read_metadata(_read(path), path)["manifest"])
        return stored_settings_of(StoreHeader(**manifest["header"]), len(manifest["windows"]))
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise altered(path, "its manifest cannot be read") from error


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
    return read_bounded(
        path,
        MOST_BYTES,
        what="a pack",
        finding_id="fidelity.pack_unreadable",
        remedy="give the file that assay reference pack wrote",
    )
