"""Transforms of keys and values before a codec: decorrelated coefficients, and rotary embeddings
taken off.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from assay.errors import AssayError, UsageError
from assay_lab.kv.codecs.base import BlockCoder, Stage
from assay_lab.kv.codecs.samples import Samples, Site, Tables, need_table

# The transform of the `pca` codec: decorrelated coefficients in which plain squared error is error
# that matters.
#
# All KV heads of a token form one row x of `width` values. With mean μ, metric M = L Lᵀ (error e
# costs e M eᵀ) and covariance Σ of the samples, Lᵀ Σ L = U Λ Uᵀ gives the Karhunen-Loève transform
# in that metric: x − μ = Δ c S with S = Uᵀ L⁻¹, coefficients c with variances Λ / Δ². A step of 1
# in c costs Δ² / 12 wherever it is taken, so one step for all is the best for a sum of errors
# (reverse water-filling). S is kept in 8 bits with a scale for each row; coefficients are found
# from the rounded S by least squares in the metric, so rounding costs nothing but its effect on the
# span.


@dataclass(frozen=True)
class Predictor:
    """x̂ = side P from what the decoder already has; its offset is in the mean.

    P [side width, width] is int8 times an fp16 scale for each column: the residual is taken with
    the rounded P.
    """

    weight: torch.Tensor
    scale: torch.Tensor

    def __call__(self, side: torch.Tensor) -> torch.Tensor:
        """[..., side width] → [..., width], float32."""
        return (side.float() @ self.weight.to(side.device).float()) * self.scale.to(
            side.device
        ).float()

    def to(self, device: torch.device) -> Predictor:
        """The same on a device."""
        return Predictor(self.weight.to(device), self.scale.to(device))


@dataclass(frozen=True)
class Klt:
    """c = (x − μ) A and x = μ + c S; `mean` and `analysis` [width, rank] in float32.

    S [rank, width] is `synthesis`, int8, times `scale` [rank], float32.
    """

    mean: torch.Tensor
    synthesis: torch.Tensor
    scale: torch.Tensor
    analysis: torch.Tensor

    @classmethod
    def of(cls, mean: torch.Tensor, rows: torch.Tensor, metric: torch.Tensor) -> Klt:
        """Round the rows of S [rank, width], float64, and find the analysis that suits what is left
        of them.
        """
        scale = (rows.abs().amax(dim=1) / 127).clamp_min(torch.finfo(torch.float32).tiny).float()
        synthesis = (rows / scale.double()[:, None]).round().clamp(-127, 127).to(torch.int8)
        return cls(
            mean, synthesis, scale, analysis(synthesis.double() * scale.double()[:, None], metric)
        )

    @property
    def rank(self) -> int:
        """Coefficients of a row."""
        return int(self.synthesis.shape[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rows [..., width] → coefficients [..., rank], float32."""
        return (x - self.mean.to(x.device)) @ self.analysis.to(x.device)

    def inverse(self, c: torch.Tensor) -> torch.Tensor:
        """Coefficients → rows."""
        return (
            self.mean.to(c.device)
            + (c * self.scale.to(c.device)) @ self.synthesis.to(c.device).float()
        )

    def kept(self, order: NDArray[np.int64]) -> Klt:
        """These coefficients alone, in this order."""
        return Klt(
            self.mean,
            self.synthesis[order],
            self.scale[order],
            self.analysis[:, order].contiguous(),
        )

    def to(self, device: torch.device) -> Klt:
        """The same on a device."""
        return Klt(*(t.to(device) for t in (self.mean, self.synthesis, self.scale, self.analysis)))

    def tables(self) -> Tables:
        """What a decoder needs; `analysis` it does not."""
        return {
            "mean": self.mean.numpy(),
            "synthesis": self.synthesis.numpy(),
            "synthesis_scale": self.scale.numpy(),
        }


@dataclass(frozen=True)
class Spectrum:
    """The transform before a step is chosen: rows of S for Δ = 1 and the variances of their
    coefficients.
    """

    mean: torch.Tensor
    rows: torch.Tensor
    variances: torch.Tensor
    metric: torch.Tensor
    scale: float
    """What `metric` was divided by: an error of 1 in a coefficient costs that much in the metric
    that was given.
    """

    def with_step(self, step: float, smallest: float) -> Klt:
        """The transform for Δ = `step`; coefficients whose deviation is below `smallest` steps are
        left out.
        """
        keep = max(1, int((self.variances.sqrt() > smallest * step).sum()))
        return Klt.of(self.mean, self.rows[:keep] * step, self.metric)


def spectrum(rows: torch.Tensor, metric: torch.Tensor, ridge: float = 1e-4) -> Spectrum:
    """From sampled rows [n, width] and a metric [width, width], all in float64 on the CPU."""
    mean = rows.mean(dim=0).float()
    eye = torch.eye(metric.shape[0], dtype=torch.float64)
    scale = float(metric.diagonal().mean())
    metric = metric / scale + ridge * eye
    lower = torch.linalg.cholesky(metric)
    white = (rows - mean.double()) @ lower
    values, vectors = torch.linalg.eigh(white.T @ white / max(1, rows.shape[0]))
    order = torch.arange(values.numel() - 1, -1, -1)
    inverse = torch.linalg.solve_triangular(lower, vectors[:, order].T, upper=False, left=False)
    return Spectrum(mean, inverse, values[order].clamp_min(0), metric, scale)


def analysis(rows: torch.Tensor, metric: torch.Tensor) -> torch.Tensor:
    """A = M Sᵀ (S M Sᵀ)⁻¹ of S = `rows`, float64: coefficients with the least error in the metric,
    float32.
    """
    right = metric @ rows.T
    lower = torch.linalg.cholesky(rows @ right)
    return torch.cholesky_solve(right.T, lower).T.contiguous().float()


def predictor_of(rows: torch.Tensor, side: torch.Tensor, ridge: float = 1e-3) -> Predictor:
    """Least squares of rows [n, width] on side rows [n, side width], with a ridge in proportion to
    each side channel.
    """
    near = side - side.mean(dim=0)
    gram = near.T @ near
    gram.diagonal().mul_(1 + ridge).clamp_min_(1e-12)
    solved = torch.linalg.solve(gram, near.T @ (rows - rows.mean(dim=0)))
    scale = (solved.abs().amax(dim=0) / 127).clamp_min(2.0**-24).half()
    return Predictor((solved / scale.double()).round().clamp(-127, 127).to(torch.int8), scale)


def restored(site: Site, tables: Tables, who: str) -> Klt:
    """The transform from its tables."""

    def get(name: str) -> torch.Tensor:
        return torch.from_numpy(need_table(tables, name, who, site))

    return Klt(get("mean"), get("synthesis"), get("synthesis_scale"), get("analysis"))


def sampled_rows(samples: Samples, who: str) -> torch.Tensor:
    """The sampled tokens as rows [n, width], float64 on the CPU."""
    return rows_of(samples.need_x(who)[None].cpu())[0].double()


def rows_of(x: torch.Tensor) -> torch.Tensor:
    """[blocks, heads, tokens, head_dim] → [blocks, tokens, heads · head_dim]."""
    return x.transpose(1, 2).flatten(2)


class TransformCoder(BlockCoder):
    """What the two codings of `pca` share: blocks of tokens through prediction and transform to
    coefficients [blocks, tokens, rank], and back."""

    def __init__(
        self, site: Site, transform: Klt, predictor: Predictor | None, own: Tables
    ) -> None:
        super().__init__(site)
        self.transform = transform
        self._predictor = predictor
        self._own = own
        self._moved: dict[torch.device, tuple[Klt, Predictor | None]] = {}

    @property
    def rank(self) -> int:
        """Coefficients that are coded."""
        return self.transform.rank

    @property
    def tables(self) -> Tables:
        """Those of transform and predictor, and of the coding under `inner.`."""
        found = self.transform.tables()
        if self._predictor is not None:
            found["predictor"] = self._predictor.weight.numpy()
            found["predictor_scale"] = self._predictor.scale.numpy()
        found.update({f"inner.{name}": table for name, table in self._own.items()})
        found["analysis"] = self.transform.analysis.numpy()
        return found

    @property
    def table_bytes(self) -> int:
        """The encoder's `analysis` follows from the rest and the metric; no decoder holds it."""
        return super().table_bytes - int(self.tables["analysis"].nbytes)

    def stages(self, x: torch.Tensor, side: torch.Tensor | None = None) -> list[Stage]:
        """transform: what its rank leaves out; quantisation: the rest. All heads share the
        coefficients.
        """
        c = self.coefficients(x, side)
        rank = torch.full(x.shape[:2], float(self.rank), device=x.device)
        apart = self.apart(c)[:, None].expand_as(rank)
        values = c.flatten(1)[:, None].expand(-1, x.shape[1], -1)
        whole = self.dequantise(self.quantise(x, side), side)
        return [
            Stage("transform", self.tokens_of(c, side), values, {"rank": rank}),
            Stage("quantisation", whole, None, {"outliers": apart}),
        ]

    def apart(self, coefficients: torch.Tensor) -> torch.Tensor:
        """Share of coefficients [blocks, tokens, rank] that are coded apart from the others,
        [blocks].
        """
        return coefficients.new_zeros(coefficients.shape[0])

    def coefficients(self, x: torch.Tensor, side: torch.Tensor | None) -> torch.Tensor:
        """[blocks, heads, tokens, head_dim] → [blocks, tokens, rank]."""
        transform, predictor = self._at(x.device)
        rows = rows_of(x.float())
        if predictor is not None:
            rows = rows - predictor(rows_of(self._need(side)))
        return transform.forward(rows)

    def tokens_of(self, coefficients: torch.Tensor, side: torch.Tensor | None) -> torch.Tensor:
        """The other way round."""
        transform, predictor = self._at(coefficients.device)
        rows = transform.inverse(coefficients)
        if predictor is not None:
            rows = rows + predictor(rows_of(self._need(side)).to(rows.device))
        return rows.unflatten(-1, (self.site.heads, self.site.head_dim)).transpose(1, 2)

    def _at(self, device: torch.device) -> tuple[Klt, Predictor | None]:
        """Transform and predictor on a device, moved there once: every token that is decoded needs
        them.
        """
        if device not in self._moved:
            self._moved[device] = (
                self.transform.to(device),
                self._predictor.to(device) if self._predictor is not None else None,
            )
        return self._moved[device]

    def _need(self, side: torch.Tensor | None) -> torch.Tensor:
        if side is None:
            raise UsageError(
                "a codec that predicts needs what was decoded of the streams it predicts from"
                " (side)",
                remedy="use pca with predict=none where only one stream is at hand",
                finding_id="kv.side",
            )
        return side


# Rotary embeddings taken off and put on again, so that a codec can see keys as they were before
# them.
#
# RoPE turns pairs of channels by an angle that grows with the position: k' = k cos + rot(k) sin,
# with rot(k) = (−k₂, k₁) for the halves k₁, k₂ of the rotated channels. It is orthogonal up to the
# factor s of long-context variants (cos² + sin² = s²), so k = (k' cos − rot(k') sin) / s². The
# cosines come from the model's own rotary module, whatever its scaling.


@dataclass(frozen=True)
class Rotation:
    """Cosines and sines [tokens, rotated channels] of given positions, float32."""

    cos: torch.Tensor
    sin: torch.Tensor

    def remove(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys [..., tokens, head_dim] before RoPE, float32."""
        rotated, rest = self._split(keys)
        scale = self.cos.square() + self.sin.square()
        return self._join((rotated * self.cos - _rotate_half(rotated) * self.sin) / scale, rest)

    def apply(self, keys: torch.Tensor) -> torch.Tensor:
        """Keys [..., tokens, head_dim] after RoPE, float32."""
        rotated, rest = self._split(keys)
        return self._join(rotated * self.cos + _rotate_half(rotated) * self.sin, rest)

    def _split(self, keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        width = self.cos.shape[-1]
        keys = keys.float()
        return keys[..., :width], keys[..., width:]

    def _join(self, rotated: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        import torch

        return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    import torch

    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], dim=-1)


class Rotary:
    """The rotations of every layer of a model, computed once for positions 0 … `length` − 1."""

    def __init__(self, model: Any, length: int) -> None:
        module = getattr(model.get_decoder(), "rotary_emb", None)
        if module is None:
            raise AssayError(
                f"{type(model).__name__} has no rotary embedding that could be taken off its keys",
                finding_id="kv.rope_unknown",
                remedy="leave prerope out of the codec",
            )
        self._by_type, self._types = _rotations(
            module, model.config.get_text_config(), length, model.device
        )

    @classmethod
    def of_config(cls, config: Any, length: int) -> Rotary:
        """The rotations that transformers' model of this configuration has, without its weights; on
        the CPU.
        """
        import torch
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)
        decoder = skeleton.get_decoder()
        text = config.get_text_config()
        decoder.rotary_emb = type(decoder.rotary_emb)(config=text)
        found = cls.__new__(cls)
        found._by_type, found._types = _rotations(
            decoder.rotary_emb, text, length, torch.device("cpu")
        )
        return found

    @property
    def length(self) -> int:
        """Positions that it has rotations of."""
        return int(next(iter(self._by_type.values())).cos.shape[0])

    def cpu(self) -> Rotary:
        """The same on the CPU, without the model it came from."""
        found = type(self).__new__(type(self))
        found._by_type = {k: Rotation(r.cos.cpu(), r.sin.cpu()) for k, r in self._by_type.items()}
        found._types = self._types
        return found

    @property
    def device(self) -> torch.device:
        """Where its rotations are."""
        return next(iter(self._by_type.values())).cos.device

    def at(self, layer: int, lo: int, hi: int) -> Rotation:
        """The rotation of positions lo … hi − 1 in a layer."""
        whole = self._by_type[self._types[layer]]
        return Rotation(whole.cos[lo:hi], whole.sin[lo:hi])


def _rotations(
    module: Any, config: Any, length: int, device: torch.device
) -> tuple[dict[str, Rotation], list[str]]:
    """The rotations of each type of layer, and the type of every layer."""
    import torch

    positions = torch.arange(length, device=device).unsqueeze(0)
    probe = torch.zeros(1, device=device, dtype=torch.float32)
    by_type = "layer_type" in inspect.signature(module.forward).parameters
    types = list(
        getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    )
    types = types if by_type else ["all"] * len(types)
    found = {}
    for kind in set(types):
        cos, sin = module(probe, positions, kind) if by_type else module(probe, positions)
        found[kind] = Rotation(cos[0].float(), sin[0].float())
    return found, types
