"""The output head on vLLM's ranks, each of which may hold a shard of the vocabulary."""

from __future__ import annotations

import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from assay.engines.scoring import Head
from assay.engines.vllm.ledger import PLAIN
from assay.engines.vllm.place import Place
from assay.errors import AssayError


@dataclass(frozen=True)
class HeadFile:
    """An output head in a safetensors file (`weight` [V, d] and perhaps `bias` [V]), of which each
    rank reads its rows.
    """

    path: str
    vocab_size: int
    softcap: float | None
    scale: float

    @classmethod
    def of(cls, head: Head, folder: Path, number: int) -> HeadFile:
        """The file that the head came from, or one that is written into `folder` now."""
        path = head.file
        if path is None:
            from safetensors.torch import save_file

            path = folder / f"head-{number}.safetensors"
            parts = {"weight": head.weight} | ({} if head.bias is None else {"bias": head.bias})
            save_file({name: t.detach().cpu().contiguous() for name, t in parts.items()}, path)
        return cls(str(path), head.vocab_size, head.softcap, head.scale)

    def rows(self, lo: int, hi: int, device: torch.device) -> Head:
        """Rows lo … hi − 1, or as many of them as there are."""
        from safetensors import safe_open

        lo, hi = min(lo, self.vocab_size), min(hi, self.vocab_size)
        with safe_open(self.path, framework="pt") as file:
            found = {name: file.get_slice(name)[lo:hi].to(device) for name in file.keys()}  # noqa: SIM118
        return Head(found["weight"], found.get("bias"), softcap=self.softcap, scale=self.scale)


def words_of(error: BaseException) -> str:
    """Kind and message of an error; where it came from, if it has no message."""
    frames = traceback.extract_tb(error.__traceback__)
    where = (
        f"in {frames[-1].name}, {Path(frames[-1].filename).name}:{frames[-1].lineno}"
        if frames
        else ""
    )
    return f"{type(error).__name__}: {str(error) or where}"


def parameters(model: Any) -> Iterable[torch.Tensor]:
    """The parameters of a model; none where it is no module."""
    return model.parameters() if hasattr(model, "parameters") else ()


def whole_vocabulary(model: Any) -> int:
    """Entries of the whole head, its padding left out."""
    return int(model.logits_processor.org_vocab_size)


def first_row(model: Any, place: Place) -> int:
    """The id of the first row that this rank has."""
    size, indices = whole_vocabulary(model), getattr(model.lm_head, "shard_indices", None)
    if place.tensor_ranks == 1:
        return 0
    return (
        place.shard(size)[0] if indices is None else min(size, int(indices.org_vocab_start_index))
    )


_ALONE = Place()


def output_head(model: Any, place: Place = _ALONE) -> Head:
    """This rank's rows of the head of `model`, padding cut off. AssayError where there is none in
    plain numbers.
    """
    linear = getattr(model, "lm_head", None)
    processor = getattr(model, "logits_processor", None)
    if linear is None or processor is None:
        raise _no_head(model, "it has no lm_head with a logits processor")
    method = type(getattr(linear, "quant_method", None)).__name__
    if method not in PLAIN or linear.weight.dim() != 2 or not linear.weight.numel():
        raise _no_head(model, f"its output head is quantised or packed ({method})")
    if processor.soft_cap is not None and processor.scale != 1.0:
        raise _no_head(model, "it both caps and scales its logits")
    size, lo = whole_vocabulary(model), first_row(model, place)
    indices = getattr(linear, "shard_indices", None)
    if place.tensor_ranks == 1 or indices is None:
        rows = slice(*place.shard(size))
    else:
        rows = slice(0, min(size, int(indices.org_vocab_end_index)) - lo)
    bias = getattr(linear, "bias", None)
    return Head(
        linear.weight.detach()[rows],
        None if bias is None else bias.detach()[rows],
        softcap=processor.soft_cap,
        scale=float(processor.scale),
    )


def check_head(model: Any, head: Head, place: Place, states: torch.Tensor) -> None:
    """Compare the head with the engine's own logits on some states [n, d]; AssayError where they
    differ.

    The engine gathers its logits of these few rows, as it does for every token that it samples.
    """
    own = model.compute_logits(states)
    if own is None:  # gathered by another rank
        return
    lo, whole = first_row(model, place), own.shape[-1]
    own = own[..., lo : lo + head.vocab_size].float()
    rebuilt = head.logits(states)
    finite = torch.isfinite(own)
    largest = float(own[finite].abs().max()) if finite.any() else 0.0
    tolerance = (
        max(4 * float(torch.finfo(states.dtype).eps), 1e-5) * largest
    )  # float32 sums in another order
    difference = float((own - rebuilt)[finite].abs().max()) if finite.any() else 0.0
    if (
        whole != whole_vocabulary(model)
        or own.shape != rebuilt.shape
        or not difference <= tolerance
    ):
        raise AssayError(
            f"the logits of {type(model).__name__} cannot be rebuilt from its final states: they"
            f" differ by {difference:.3g}",
            finding_id="fidelity.no_head",
            remedy="compare it through another engine (hf:, gguf:)",
            evidence={"max_difference": difference, "tolerance": tolerance},
        )


def _no_head(model: Any, why: str) -> AssayError:
    return AssayError(
        f"the logits of {type(model).__name__} cannot be rebuilt from its final states: {why}",
        finding_id="fidelity.no_head",
        remedy="compare it through another engine (hf:, gguf:)",
    )
