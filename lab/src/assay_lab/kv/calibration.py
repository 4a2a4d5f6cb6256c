"""The calibration file: samples of keys and values, and the metrics in which their errors hurt.

One safetensors file. For every layer l:

    layer_{l}_k            bf16 [KV heads, tokens, head_dim], keys before RoPE
    layer_{l}_v            the same of values
    layer_{l}_sigma_rope   f32 [KV heads, d, d], second moment of the queries of the head's group
                           before RoPE, not centred, averaged over the rotations of relative
                           positions
    layer_{l}_gram         f32 [KV heads, d, d], Gram matrix of the output projection, summed over
                           the group
    positions              int32 [tokens], place of each sample in its window
    sensitivity            f32 [layers, 2], of keys and values: KL in nats for an error of 1 in the
                           metric (`--sensitivity`)
    levels_{k|v}_{b}       f32 [2^b], levels of residuals for the codec `kakeya`

In the file samples are coded in six to seven bits a value (`sample_packing`), in version 1 they
were plain; both are read.

A file made from those of older tools (`lab/benchmarks/kv/kv_import.py`) has only sigma of some
layers, and levels; one of `assay kv calibrate` has all but levels. `layer_{l}_sigma`, which older
files have too, is the moment before it is averaged.

The metadata holds the model's cache shape, the hashes of the text and of every window, and those of
some of their passages.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from assay.engines.scoring import Window
from assay.errors import AssayError
from assay_lab.kv.cache_shape import CacheShape
from assay_lab.kv.codecs.samples import LayerStream, Samples
from assay_lab.kv.rotary import Rotary, Rotation
from assay_lab.kv.sample_packing import coded, decoded
from assay_lab.kv.sampler import averaged, gram

if TYPE_CHECKING:
    import torch

FORMAT = "assay-kv-calibration"
VERSION, READ = "2", ("1", "2")
_POSITIONS = 2048
"""Positions that a moment is averaged over where the file does not have the average."""


@dataclass(frozen=True)
class Calibration:
    """A calibration as its file holds it. `provenance` is plain JSON."""

    tensors: Mapping[str, torch.Tensor]
    provenance: Mapping[str, Any]

    def samples(self, site: LayerStream, *, before_rope: bool, rotary: Rotary | None) -> Samples:
        """What a codec may learn from at one site; keys are put through RoPE unless
        `before_rope`.
        """
        states = self.tensors.get(f"layer_{site.layer}_{site.stream}")
        positions = None if states is None else self.tensors["positions"].long()
        levels = self._levels(site.stream)
        measured = self.tensors.get("sensitivity")
        cost = None if measured is None else float(measured[site.layer, "kv".index(site.stream)])
        if site.stream == "v":
            metric = self.tensors.get(f"layer_{site.layer}_gram")
            return Samples(site, _float(states), positions, metric, sensitivity=cost, levels=levels)
        if states is not None and positions is not None and not before_rope:
            if rotary is None:
                raise ValueError("keys after RoPE need the model's rotary embedding")
            # Calibrated on longer windows than are scored: later samples have no rotation here.
            known = positions < rotary.length
            states, positions = states[:, known], positions[known]
            whole = rotary.at(site.layer, 0, rotary.length)
            states = Rotation(whole.cos.cpu()[positions], whole.sin.cpu()[positions]).apply(states)
        metric = self._metric(site.layer, before_rope, rotary)
        return Samples(site, _float(states), positions, metric, sensitivity=cost, levels=levels)

    def _metric(self, layer: int, before_rope: bool, rotary: Rotary | None) -> torch.Tensor | None:
        """The queries' second moment of a layer, averaged over rotations.

        After RoPE channels of a pair mix over positions, so there too only the averaged one has a
        meaning. Files of older tools hold the plain one: before RoPE it is taken as it is,
        which is what those tools did.
        """
        found = self.tensors.get(f"layer_{layer}_sigma_rope")
        plain = self.tensors.get(f"layer_{layer}_sigma")
        if found is not None or plain is None or before_rope or rotary is None:
            return plain if found is None else found
        return averaged(plain.float(), rotary, layer, rotary.at(layer, 0, _POSITIONS).cos.shape[0])

    def _levels(self, stream: str) -> dict[int, torch.Tensor]:
        start = f"levels_{stream}_"
        return {
            int(n.removeprefix(start)): t for n, t in self.tensors.items() if n.startswith(start)
        }

    def of_rank(self, rank: int, ranks: int) -> Calibration:
        """The same of the KV heads that one of `ranks` has."""
        if ranks == 1:
            return self

        def part(name: str, tensor: torch.Tensor) -> torch.Tensor:
            each = tensor.shape[0] // ranks
            return tensor[rank * each : (rank + 1) * each] if name.startswith("layer_") else tensor

        return replace(self, tensors={name: part(name, t) for name, t in self.tensors.items()})

    def check_model(self, shape: CacheShape) -> None:
        """AssayError where it is of another model."""
        mine = self.provenance.get("cache", {})
        theirs = json.loads(json.dumps(shape.to_json()))
        if mine != theirs:
            differing = [k for k in theirs if mine.get(k) != theirs[k]]
            raise AssayError(
                f"the calibration is of another model: it differs in {', '.join(differing)}",
                finding_id="kv.calibration_mismatch",
                remedy="calibrate this model: assay kv calibrate MODEL --out FILE --text FILE",
                evidence={k: [mine.get(k), theirs[k]] for k in differing},
            )

    def check_weights(self, output: torch.Tensor, layer: int = 0) -> None:
        """AssayError where the output projection [hidden, H·d] of a layer is another than the
        calibrated model's.

        Shapes tell no fine-tuned sibling apart. A model whose weights are rounded still passes.
        """
        known = self.tensors.get(f"layer_{layer}_gram")
        if known is None:
            return
        found = gram(output, known.shape[0], known.shape[-1])
        apart = float((found - known).norm() / known.norm())
        if apart > _OTHER_WEIGHTS:
            raise AssayError(
                "the calibration is of another model of the same shape: the output projection of"
                f" layer {layer} differs by {100 * apart:.0f} %",
                finding_id="kv.calibration_mismatch",
                remedy="calibrate this model: assay kv calibrate MODEL --out FILE --text FILE",
                evidence={"layer": layer, "difference": apart},
            )

    def check_text(self, text: Mapping[str, Any], windows: Sequence[Window]) -> None:
        """AssayError where evaluation text, given by its facts and windows, was calibrated on, or
        holds passages that were.

        Passages are found wherever they are cut: see `passages`.
        """
        shared = set(self.provenance.get("windows", ())) & {w.sha256 for w in windows}
        whole = self.provenance.get("text", {}).get("sha256") == text.get("sha256")
        known = set(self.provenance.get("passages", ()))
        own = passages(windows) if known else []
        again = sum(p in known for p in own) / max(1, len(own))
        if shared or whole or again > _SHARED:
            what = "it is the same text" if whole else f"{len(shared)} windows are the same"
            if not (whole or shared):
                what = f"about {100 * again:.0f} % of its passages stand there too"
            raise AssayError(
                f"the evaluation text was used for calibration: {what}",
                finding_id="kv.calibration_leak",
                remedy="evaluate on other text: a score on calibration text says nothing",
                evidence={"shared_windows": len(shared), "shared_passages": again},
            )


def passages(windows: Sequence[Window]) -> list[str]:
    """Hashes of one in 64 of all runs of 32 tokens, at any place in their window: the same
    runs in every text.
    """
    found: set[str] = set()
    for window in windows:
        tokens = np.asarray(window.tokens, np.uint64) + np.uint64(1)
        if tokens.size < _RUN:
            continue
        value = np.zeros(tokens.size - _RUN + 1, np.uint64)
        for i in range(_RUN):
            value = value * _BASE + tokens[i : i + value.size]
        value = (value ^ (value >> np.uint64(31))) * _MIX
        found |= {f"{v:016x}" for v in value[value >> np.uint64(58) == 0].tolist()}
    return sorted(found)


def without_passages(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """What a report shows of where a calibration came from."""
    return {k: v for k, v in provenance.items() if k != "passages"}


_RUN = 32
_BASE, _MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)
_SHARED = 0.02
"""Share of passages from which a text counts as calibrated on; licences and headings recur below
it.
"""
_OTHER_WEIGHTS = 0.05


def _float(states: torch.Tensor | None) -> torch.Tensor | None:
    return None if states is None else states.float()


def write_calibration(path: Path, calibration: Calibration) -> None:
    """Write the file, whole or not at all."""
    from safetensors.torch import save_file

    part = path.with_suffix(path.suffix + ".part")
    metadata = {
        "format": FORMAT,
        "version": VERSION,
        "provenance": json.dumps(calibration.provenance),
    }
    save_file(
        {k: v.contiguous() for k, v in coded(calibration.tensors).items()}, part, metadata=metadata
    )
    part.replace(path)


def read_calibration(path: Path) -> Calibration:
    """Read a file; AssayError where it is missing, damaged or something else."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    except (OSError, SafetensorError) as error:
        raise _unreadable(
            f"cannot read the calibration {path}: {str(error).removesuffix(f': {path}')}"
        ) from error
    if metadata.get("format") != FORMAT or metadata.get("version") not in READ:
        raise _unreadable(
            f"{path} is no calibration of assay (format {metadata.get('format')!r}, version"
            f" {metadata.get('version')!r})"
        )
    try:
        return Calibration(decoded(tensors), json.loads(metadata["provenance"]))
    except (zlib.error, KeyError, RuntimeError, ValueError) as error:
        raise _unreadable(
            f"cannot read the calibration {path}: its samples are damaged ({error})"
        ) from error


def _unreadable(message: str) -> AssayError:
    return AssayError(
        message,
        finding_id="kv.calibration_unreadable",
        remedy="make it with `assay kv calibrate MODEL --text FILE --out FILE`",
    )
