"""A coder of coefficients: transform, prediction, and what is coded exactly."""

from __future__ import annotations

import torch

from assay.errors import UsageError
from assay_lab.kv.codecs.base import BlockCoder, Stage
from assay_lab.kv.codecs.samples import LayerStream, Tables
from assay_lab.kv.klt import Klt, Predictor, rows_of


class TransformCoder(BlockCoder):
    """What the two codings of `pca` share: blocks of tokens through prediction and transform to
    coefficients [blocks, tokens, rank], and back."""

    def __init__(
        self, site: LayerStream, transform: Klt, predictor: Predictor | None, own: Tables
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

    def stages(self, x: torch.Tensor, predictors: torch.Tensor | None = None) -> list[Stage]:
        """transform: what its rank leaves out; quantisation: the rest. All heads share the
        coefficients.
        """
        c = self.coefficients(x, predictors)
        rank = torch.full(x.shape[:2], float(self.rank), device=x.device)
        apart = self.apart(c)[:, None].expand_as(rank)
        values = c.flatten(1)[:, None].expand(-1, x.shape[1], -1)
        whole = self.dequantise(self.quantise(x, predictors), predictors)
        return [
            Stage("transform", self.tokens_of(c, predictors), values, {"rank": rank}),
            Stage("quantisation", whole, None, {"outliers": apart}),
        ]

    def apart(self, coefficients: torch.Tensor) -> torch.Tensor:
        """Share of coefficients [blocks, tokens, rank] that are coded apart from the others,
        [blocks].
        """
        return coefficients.new_zeros(coefficients.shape[0])

    def coefficients(self, x: torch.Tensor, predictors: torch.Tensor | None) -> torch.Tensor:
        """[blocks, heads, tokens, head_dim] → [blocks, tokens, rank]."""
        transform, predictor = self._at(x.device)
        rows = rows_of(x.float())
        if predictor is not None:
            rows = rows - predictor(rows_of(self._need(predictors)))
        return transform.forward(rows)

    def tokens_of(
        self, coefficients: torch.Tensor, predictors: torch.Tensor | None
    ) -> torch.Tensor:
        """The other way round."""
        transform, predictor = self._at(coefficients.device)
        rows = transform.inverse(coefficients)
        if predictor is not None:
            rows = rows + predictor(rows_of(self._need(predictors)).to(rows.device))
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

    def _need(self, predictors: torch.Tensor | None) -> torch.Tensor:
        if predictors is None:
            raise UsageError(
                "a codec that predicts needs what was decoded of the streams it predicts from"
                " (side)",
                remedy="use pca with predict=none where only one stream is at hand",
                finding_id="kv.side",
            )
        return predictors
