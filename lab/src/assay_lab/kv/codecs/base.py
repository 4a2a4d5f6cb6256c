"""What a codec is, and what a coder fitted to one stream is.

A `Codec` is a frozen dataclass whose fields are its parameters. `fit` makes a `BlockCoder` for one
stream (K or V) of one layer, with all its KV heads, so that a codec may join heads. A coder has two
halves: `quantise`/`dequantise` turn blocks of tokens into tensors of codes and back;
`pack`/`unpack` turn those into bytes and back. The halves meet in a stream, which adds header,
index and checksums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import ClassVar, TypeAlias

import torch

from assay_lab.kv.codecs.fields import Field, join_fields, split_fields
from assay_lab.kv.codecs.samples import LayerStream, Samples, Tables

Parts: TypeAlias = "tuple[torch.Tensor, ...]"
"""Codes of a batch of blocks; the first dimension of each tensor counts blocks."""

BLOCK_TOKENS = 128
"""Tokens of a block of the stream, the unit of random access, for coders that code each token
alone.
"""


@dataclass(frozen=True)
class Stage:
    """What one stage of a coder did to blocks [blocks, heads, tokens, head_dim], for diagnosis.

    `decoded`: what would come back if all later stages lost nothing. `values` [blocks, heads, n]:
    what the next stage takes, NaN where a block has fewer. `figures`: what else there is to say,
    [blocks, heads] by name.
    """

    name: str
    decoded: torch.Tensor
    values: torch.Tensor | None = None
    figures: Mapping[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Capabilities:
    """What a codec with its parameters can do, for those that ask before it is fitted.

    Attributes:
        token_by_token: Each token is coded alone, so that any can be decoded without the others,
            and tokens may be fed together.
        entropy_coded: The bytes of a token depend on its values.
        not_in_tier: Why its blocks cannot leave the engine; empty if they can.
    """

    token_by_token: bool = False
    entropy_coded: bool = False
    not_in_tier: str = ""


@dataclass(frozen=True)
class Codec:
    """Base of all codecs: the fields of a subclass are its parameters, in the order of its SPEC."""

    name: ClassVar[str]
    summary: ClassVar[str]
    instead: ClassVar[Mapping[str, str]] = {}
    """Parameters, once they are set, in whose place another would say nothing."""
    single_heads: ClassVar[bool] = False
    """Whether it codes each KV head as if it were alone; else ranks that share the heads cannot run
    it.
    """

    def fit(self, samples: Samples) -> BlockCoder:
        """A coder for the site of `samples`; AssayError where it needs samples that are not
        there.
        """
        raise NotImplementedError

    def predictor_keys(self, site: LayerStream) -> tuple[tuple[int, str], ...]:
        """The streams (layer, stream) out of which it predicts those of a site; they must be coded
        before it.
        """
        return ()

    @property
    def capabilities(self) -> Capabilities:
        """What it can do, by its parameters. The cautious answer holds for any codec."""
        return Capabilities(not_in_tier=f"{self.name} is not entropy-coded")

    @property
    def joins_heads(self) -> bool:
        """Whether what a head becomes depends on the others, by its parameters."""
        return not self.single_heads

    def restore(self, site: LayerStream, tables: Tables) -> BlockCoder:
        """The coder whose `tables` were kept. A codec that learns nothing needs none."""
        return self.fit(Samples(site))

    def __str__(self) -> str:
        given = [
            f"{f.name}={_text(getattr(self, f.name))}" for f in fields(self) if self._is_set(f.name)
        ]
        return f"{self.name}({', '.join(given)})" if given else self.name

    def _is_set(self, field: str) -> bool:
        default = next(f.default for f in fields(self) if f.name == field)
        return bool(getattr(self, field) != default)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


class BlockCoder:
    """A codec fitted to one site. Blocks are [blocks, heads, tokens, head_dim] of any floating type
    and device.

    `granularity` is the number of tokens that are reconstructed from common side information (1:
    each token alone); `block_tokens` is the length of a full block, a multiple of it; only the last
    block of a sequence may be shorter.
    """

    granularity: int = 1
    block_tokens: int = BLOCK_TOKENS
    exact_last: int = 0
    lossless: bool = False

    def __init__(self, site: LayerStream) -> None:
        self.site = site

    @property
    def tables(self) -> Tables:
        """What was learnt, enough for `Codec.restore`."""
        return {}

    @property
    def table_bytes(self) -> int:
        """Bytes of `tables`: what the decoder must hold beside the stream."""
        return sum(int(table.nbytes) for table in self.tables.values())

    def quantise(self, x: torch.Tensor, predictors: torch.Tensor | None = None) -> Parts:
        """Codes of whole blocks."""
        raise NotImplementedError

    def dequantise(self, parts: Parts, predictors: torch.Tensor | None = None) -> torch.Tensor:
        """The values of codes: [blocks, heads, tokens, head_dim], float32."""
        raise NotImplementedError

    def reconstruct(self, x: torch.Tensor, predictors: torch.Tensor | None = None) -> torch.Tensor:
        """What blocks become, float32. A coder that has a faster way to the same values overrides
        it.
        """
        return self.dequantise(self.quantise(x, predictors), predictors)

    def layout(self, tokens: int) -> list[Field]:
        """The fields of a payload of so many tokens, one for each tensor of codes, where all are of
        fixed size.
        """
        raise NotImplementedError

    def pack(self, parts: Parts) -> list[bytes]:
        """The bytes of each block."""
        return join_fields(
            self.layout(0), parts
        )  # how many tokens there are, the codes themselves say

    def unpack(self, payloads: Sequence[bytes], tokens: int) -> Parts:
        """The codes in `payloads`, blocks of `tokens` tokens each; AssayError where a payload is
        damaged.
        """
        return split_fields(self.layout(tokens), payloads)

    def stages(self, x: torch.Tensor, predictors: torch.Tensor | None = None) -> list[Stage]:
        """The stages that blocks go through, the last of which is the whole round trip; none where
        it is one step.
        """
        return []

    def to(self, device: torch.device) -> None:
        """Move what was learnt to `device`."""
