"""A published capture as the reference: `pack:FOLDER`, in the format
`malaiwah.fidelity-dataset.v1`.

Format: docs/FIDELITY-DATASET-SPEC.md of https://github.com/malaiwah/quant-fidelity-suite. Read are
captures of the states before the output head (`hidden` form) over windows of one length of which
every token but the first is scored. The whole chain of seals is checked first: the manifest's own
hash, that of `checksums.txt`, every file in it, every tensor, the token ids and the head.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from assay.engines.scoring import Window
from assay.errors import AssayError
from assay.fidelity.store.manifest import StoreHeader

if TYPE_CHECKING:
    import torch

NAME, FORMAT = "fidelity-dataset.json", "malaiwah.fidelity-dataset.v1"
CUT = "after_final_rmsnorm_before_lm_head"
_DTYPES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}


class Capture:
    """A capture that was checked: header, windows, states [windows, n, d], and the head where it is
    in the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts = facts = self._sealed(NAME, "dataset_sha256")
        if facts.get("schema") != FORMAT:
            self._refuse(f"is of the format {facts.get('schema')!r}, not {FORMAT}")
        try:
            self._files()
            self._read()
        except AssayError:
            raise
        except Exception as error:  # a damaged file or a missing key
            self._refuse(f"cannot be read ({type(error).__name__}: {error})")

    def _files(self) -> None:
        """Every file is that of `checksums.txt`, and there is no other."""
        text = self._bytes("checksums.txt")
        if hashlib.sha256(text).hexdigest() != self.facts["seal"]["checksums_sha256"]:
            self._refuse("has a checksums.txt that is not the sealed one")
        lines = (line.partition("  ") for line in text.decode().splitlines())
        listed = {name: digest for digest, _, name in lines}
        found = {
            p.relative_to(self.folder).as_posix() for p in self.folder.rglob("*") if p.is_file()
        }
        if strange := sorted(found - set(listed) - {NAME, "checksums.txt"}):
            self._refuse(f"holds {strange[0]}, which is not in checksums.txt")
        for name, digest in listed.items():
            if hashlib.sha256(self._bytes(name)).hexdigest() != digest:
                self._refuse(f"has an altered file: {name}")

    def _read(self) -> None:
        import torch

        capture, panel = (
            json.loads(self._bytes(n)) for n in ("capture/manifest.json", "panel/panel.json")
        )
        if capture["form"] != "hidden" or capture["semantic_point"] != CUT:
            self._refuse(
                f"holds {capture['form']} at {capture['semantic_point']}; only states {CUT} can be"
                " read"
            )
        tokens = {r["index"]: self._ids(r) for r in panel["records"]}
        hashes = "\n".join(
            r["token_ids_json_sha256"] for r in sorted(panel["records"], key=lambda r: r["index"])
        )
        if (
            hashlib.sha256(hashes.encode()).hexdigest()
            != self.facts["panel"]["suite_token_hash_sha256"]
        ):
            self._refuse("has other token ids than those that were sealed")
        length = {len(ids) for ids in tokens.values()}
        records = sorted(capture["records"], key=lambda r: r["index"])
        if (
            len(length) != 1
            or panel["scoring_window"]["score_from"]
            or any(r["scored_rows"] != max(length) - 1 for r in records)
        ):
            self._refuse(
                "has windows of several lengths, or scores a part of each; every token but the"
                " first is needed"
            )
        parts = [
            self._tensor(f"capture/{r['file']}", r["key"], r["tensor_content_sha256"])
            for r in records
        ]
        content = "\n".join(f"{r['index']}:{r['tensor_content_sha256']}" for r in records)
        if (
            hashlib.sha256(content.encode("ascii")).hexdigest()
            != self.facts["capture"]["capture_content_digest"]
        ):
            self._refuse("has other states than those that were sealed")
        self.states = torch.stack(parts)
        self.windows = tuple(Window(r["index"], tokens[r["index"]]) for r in records)
        head = self.facts["head"]
        self.head = None
        if head.get("file") and (self.folder / "head" / head["file"]).exists():
            self.head = self._tensor(
                f"head/{head['file']}", head["tensor_key"], head["tensor_content_sha256"]
            )
        weights = self.facts.get("weights") or {}
        self.header = StoreHeader(
            engine={
                "engine": "capture",
                "model": str(weights.get("repository")),
                "revision": weights.get("revision"),
            },
            tokenizer={"sha256": "", "vocab_size": head["shape"][0]},
            text={
                "sources": [panel["panel_id"]],
                "sha256": self.facts["panel"]["suite_token_hash_sha256"],
            },
            path="prefill",
            scored_from=1,
            length=max(length),
            dtype=_DTYPES[capture["dtype"]],
        )

    @property
    def manifest(self) -> dict[str, Any]:
        """What a pack's manifest says: the head by the digest of its bytes, and that nothing was
        rounded for packing.
        """
        head = self.facts["head"]
        facts = {
            "sha256": head["tensor_content_sha256"],
            "content": True,
            "vocab_size": head["shape"][0],
            "width": head["shape"][1],
            "dtype": _DTYPES[head["dtype"]],
            "softcap": None,
            "scale": 1.0,
        }
        return {
            "head": facts,
            "rounding": {"stored": self.header.dtype, "kld_mean": 0.0, "kld_max": 0.0},
        }

    def _ids(self, record: Mapping[str, Any]) -> tuple[int, ...]:
        ids = json.loads(self._bytes(f"panel/{record['token_file']}"))
        digest = hashlib.sha256(json.dumps(ids, separators=(",", ":")).encode()).hexdigest()
        if digest != record["token_ids_json_sha256"]:
            self._refuse(f"has other token ids in {record['token_file']}")
        return tuple(map(int, ids))

    def _tensor(self, name: str, key: str, digest: str) -> torch.Tensor:
        from safetensors.torch import load

        tensors = load(self._bytes(name))
        tensor = tensors[key] if key in tensors else tensors["weight"]
        if content_digest(tensor) != digest:
            self._refuse(f"has another tensor in {name}")
        return tensor

    def _sealed(self, name: str, seal: str) -> dict[str, Any]:
        """A JSON object that carries the hash of itself with that hash left blank."""
        try:
            found = json.loads(self._bytes(name))
            text = json.dumps(
                found | {seal: ""}, sort_keys=True, separators=(",", ":"), ensure_ascii=False
            )
        except (ValueError, TypeError, RecursionError):
            self._refuse(f"has no {name} that can be read")
        if hashlib.sha256(text.encode()).hexdigest() != found.get(seal):
            self._refuse(f"has an altered {name}")
        return dict(found)

    def _bytes(self, name: str) -> bytes:
        path = self.folder / name
        inside = path.resolve().is_relative_to(self.folder.resolve()) and not path.is_symlink()
        if Path(name).is_absolute() or not inside:
            self._refuse(f"names a file outside of it: {name}")
        try:
            return path.read_bytes()
        except OSError as error:
            self._refuse(f"lacks {name}: {error.strerror}")

    def _refuse(self, what: str) -> NoReturn:
        raise AssayError(
            f"the capture {self.folder.name} {what}",
            finding_id="fidelity.pack_altered",
            remedy="fetch it again, or give a pack: assay reference pack DIR --out FILE",
        )


def content_digest(tensor: torch.Tensor) -> str:
    """SHA-256 of the bytes of a tensor, in its own type."""
    import torch

    return hashlib.sha256(
        tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    ).hexdigest()
