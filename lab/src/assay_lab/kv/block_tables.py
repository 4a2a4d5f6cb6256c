"""The tables that all blocks of a tier share, and what they were made for.

They are a file of their own, named by the digest of its contents, which says of which model and
codec they are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from assay.checkpoint.digests import Digest, DigestCache, hash_files
from assay.errors import AssayError
from assay.runs import cache_dir, write_atomically
from assay_lab.kv.block_errors import BlockDamaged, BlockOfOtherVersion, BlockRefused
from assay_lab.kv.codecs.pca_entropy import RangeCoder
from assay_lab.kv.layer_coders import CoderSet, LayerCoders
from assay_lab.kv.pages.source import BLOCKS, source_of
from assay_lab.kv.spec import KvSpec, parse_spec

_TABLES = "assay-kv-tables/1"


@dataclass(frozen=True)
class Facts:
    """What tables are of. `model` names the weights by digest, `exact_first` the sinks; keys are
    coded before RoPE or after.

    `scaling` is the factor that RoPE's variants for long contexts put on cosines and sines.
    """

    spec: str
    model: str
    architecture: str
    layers: int
    kv_heads: int
    head_dim: int
    exact_first: int
    before_rope: bool
    scaling: float

    @property
    def width(self) -> int:
        """Values of a token in one stream of a layer."""
        return self.kv_heads * self.head_dim

    @property
    def token_bytes(self) -> int:
        """Bytes of a token in bf16, all layers."""
        return 4 * self.layers * self.width


def check_codec(spec: KvSpec) -> None:
    """AssayError for a codec that has no stored blocks: they hold both streams, entropy-coded by
    one quantiser.
    """
    for stream in ("k", "v"):
        recipe = spec.of(stream)
        why = None
        if recipe is None:
            why = f"{stream.upper()} is left exact"
        elif recipe.capabilities.not_in_tier:
            why = recipe.capabilities.not_in_tier
        elif recipe.exact_last:
            why = "recent tokens stay exact"
        if why is not None:
            raise AssayError(
                f"blocks cannot be stored in {spec}: {why}",
                finding_id="kv.unsupported",
                remedy=(
                    'use --codec "prerope+sinks(n=4)+pca(step=0.005, predict=all,'
                    ' weights=measured)" or the like'
                ),
            )


class BlockTables:
    """Tables of all streams of a model, by name as their coders have them, and what they are of."""

    def __init__(self, facts: Facts, tensors: Mapping[str, NDArray[Any]]) -> None:
        self.facts = facts
        self.tensors = dict(sorted(tensors.items()))

    @classmethod
    def of(
        cls,
        spec: KvSpec,
        coders: CoderSet,
        model: str,
        shape: Any,
        inv_freq: torch.Tensor,
        scaling: float,
    ) -> BlockTables:
        """From fitted coders; AssayError for a codec that has no stored blocks. `inv_freq`
        [head_dim / 2] of RoPE.
        """
        check_codec(spec)
        tensors: dict[str, NDArray[Any]] = {"inv_freq": inv_freq.double().cpu().numpy()}
        first = before = None
        for (layer, stream), fitted in coders.by_stream.items():
            if not isinstance(fitted.coder, RangeCoder):
                raise AssayError(
                    f"layer {layer}, stream {stream}, is not range-coded",
                    finding_id="kv.unsupported",
                )
            first = max(first or 0, fitted.exact_first)
            before = fitted.before_rope if stream == "k" else before
            tensors |= {
                f"{layer}.{stream}.{name}": table for name, table in fitted.coder.tables.items()
            }
            predictor_keys = [[number, source == "v"] for number, source in fitted.predictor_keys]
            tensors[f"{layer}.{stream}.sides"] = np.array(predictor_keys, np.int32).reshape(-1, 2)
        facts = Facts(
            str(spec), model, shape.architecture, shape.layers, shape.kv_heads, shape.head_dim,
            first or 0, bool(before), scaling,
        )  # fmt: skip
        return cls(facts, tensors)

    @cached_property
    def digest(self) -> bytes:
        """16 bytes of BLAKE2b over facts and tensors: names, types, shapes, values."""
        found = hashlib.blake2b(
            json.dumps(vars(self.facts), sort_keys=True).encode(), digest_size=16
        )
        for name, table in self.tensors.items():
            found.update(f"{name} {table.dtype.str} {table.shape}".encode())
            found.update(np.ascontiguousarray(table).tobytes())
        return found.digest()

    @property
    def decoder_bytes(self) -> int:
        """Bytes that a decoder needs; the encoder's `analysis` is not among them."""
        return sum(t.nbytes for name, t in self.tensors.items() if not name.endswith("analysis"))

    def write(self, folder: Path) -> Path:
        """Keep them in a folder as `DIGEST.tables`; the path."""
        from safetensors.numpy import save

        path = folder / f"{self.digest.hex()}.tables"
        with suppress(BlockRefused):  # what is damaged is written anew
            self.read(path)
            return path
        folder.mkdir(parents=True, exist_ok=True)
        facts = {"format": _TABLES, "facts": json.dumps(vars(self.facts))}
        write_atomically(
            path, save({n: np.ascontiguousarray(t) for n, t in self.tensors.items()}, facts)
        )
        return path

    @classmethod
    def read(cls, path: Path) -> BlockTables:
        """From their file; BlockDamaged where it is none, or its content has another digest than
        its name.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="np") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in list(file.keys())}
        except (OSError, SafetensorError) as error:
            raise BlockDamaged(
                f"cannot read the tables {path}: {error}", "make them again"
            ) from error
        if metadata.get("format") != _TABLES:
            raise BlockOfOtherVersion(
                f"{path} holds no tables of this assay ({_TABLES})", "make them again"
            )
        try:
            found = cls(Facts(**json.loads(metadata["facts"])), tensors)
        except (KeyError, TypeError, ValueError) as error:
            raise BlockDamaged(
                f"cannot read the tables {path}: {error}", "make them again"
            ) from error
        if found.digest.hex() != path.stem:
            raise BlockDamaged(
                f"the tables {path.name} are not what they were: their digest is"
                f" {found.digest.hex()}",
                "delete the file, and start again",
            )
        return found


def tables_for(model: str, codec: str, calibration: str | None, folder: Path) -> BlockTables:
    """The tables of a codec for the checkpoint in the folder `model`, fitted once and then kept in
    `folder`.

    AssayError for a model whose cache blocks cannot hold, a codec that has none, and a calibration
    of another model.
    """
    spec = parse_spec(codec)
    check_codec(spec)
    if calibration is None:
        raise AssayError(
            "stored blocks need a calibration",
            finding_id="kv.no_calibration",
            remedy=(
                "make one: assay kv calibrate MODEL --text FILE --out FILE, and give it by"
                " --calibration"
            ),
        )
    weights = weights_digest(Path(model))
    source = source_of(calibration, model, BLOCKS)
    cache = DigestCache(cache_dir("digests"))
    named = hashlib.blake2b(
        f"{_TABLES} {spec} {weights} {_digests([Path(calibration)], cache)}".encode(),
        digest_size=16,
    )
    link = folder / f"{named.hexdigest()}.fitted"
    with suppress(BlockRefused, OSError, ValueError):  # not there, or damaged
        kept = BlockTables.read(folder / f"{link.read_text().strip()}.tables")
        if kept.facts.model == weights and kept.facts.spec == str(spec):
            return kept
    try:
        coders = LayerCoders(source.shape, source.rotary, source.calibration).fit_all(
            lambda _, stream: spec.of(stream)
        )
    except torch.linalg.LinAlgError as error:
        raise AssayError(
            f"{spec} cannot be fitted to {calibration}: its numbers are not finite",
            finding_id="kv.spec",
            remedy="give a larger step",
        ) from error
    found = BlockTables.of(spec, coders, weights, source.shape, source.inv_freq, source.scaling)
    found.write(folder)
    write_atomically(link, found.digest.hex())
    return found


def weights_digest(model: Path) -> str:
    """A digest of configuration and weights of a checkpoint's folder; AssayError where there are
    none.
    """
    files = sorted([*model.glob("*.safetensors"), *model.glob("*.bin"), *model.glob("config.json")])
    if len(files) < 2:
        raise AssayError(
            f"{model} is no folder with config.json and weights, so that blocks could not tell its"
            " model from others",
            finding_id="kv.unsupported",
            remedy="download the checkpoint, and give its folder",
        )
    return _digests(files, DigestCache(cache_dir("digests")))


def _digests(files: Sequence[Path], cache: DigestCache) -> str:
    found: dict[str, Digest] = {}
    hash_files([(path.name, path, path.stat().st_size) for path in files], cache, found)
    if wrong := next((name for name, digest in found.items() if digest.problem), None):
        raise AssayError(
            f"cannot read {wrong}: {found[wrong].problem}",
            finding_id="kv.unreadable",
            remedy="check the path",
        )
    text = "".join(f"{name} {found[name].sha256}\n" for name in sorted(found))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
