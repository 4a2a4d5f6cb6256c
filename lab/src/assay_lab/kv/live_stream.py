"""One stream (K or V) of one layer while a batch of windows goes through the model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256
from math import sqrt
from typing import TYPE_CHECKING

import torch

from assay.errors import UsageError
from assay_lab.kv.coder_protocol import StreamCoder
from assay_lab.kv.growing import Growing
from assay_lab.kv.stream_coder import Key
from assay_lab.kv.stream_facts import BF16_BYTES, StreamFacts

if TYPE_CHECKING:
    from assay_lab.kv.rotary import Rotary


class LiveStream:
    """The exact states of a stream so far, and how far they have been coded.

    `exact` is [B, KV heads, tokens, head_dim] in the model's type, as the cache would hold it.
    """

    def __init__(self, key: Key, coder: StreamCoder | None, rotary: Rotary | None) -> None:
        self.key = key
        self.coder = coder
        self._rotary = rotary
        self._states = Growing()
        self._done = 0
        self._latest: tuple[int, torch.Tensor] | None = None

    @property
    def exact(self) -> torch.Tensor:
        """The exact states so far; ValueError before the first."""
        return self._states.states

    @property
    def length(self) -> int:
        """Tokens so far."""
        return self._states.length

    @property
    def predictor_keys(self) -> tuple[Key, ...]:
        """The streams that its coder predicts from."""
        return self.coder.predictor_keys if self.coder else ()

    @property
    def done(self) -> int:
        """Positions below are not given out by `next_blocks` again."""
        return self._done

    def append(self, new: torch.Tensor) -> None:
        """New tokens [B, h, n, d]."""
        self._states.append(new)

    def codes_at_once(self, position: int) -> bool:
        """Whether a token at `position` is coded as it comes."""
        coder = self.coder
        return bool(
            coder
            and coder.granularity == 1
            and coder.exact_last == 0
            and position >= coder.exact_first
        )

    def check_together(self, position: int, tokens: int) -> None:
        """UsageError where `tokens` that are fed at once from `position` on would not see what each
        would see alone.
        """
        if tokens == 1 or not self.coder or self.codes_at_once(position):
            return
        if max(self.whole_blocks(position)) != max(self.whole_blocks(position + tokens - 1)):
            raise UsageError(
                f"{tokens} tokens cannot be fed together at {position}: stream {self.key[1]} codes"
                f" tokens behind them in blocks of {self.coder.granularity}, with"
                f" {self.coder.exact_first} exact at the start and {self.coder.exact_last} at"
                " the end",
                remedy="feed one at a time (--block 1), or as many as the codec's blocks hold",
                finding_id="kv.block",
            )

    def whole_blocks(self, end: int) -> tuple[int, int]:
        """Positions of all blocks among the first `end` tokens that are full and not recent."""
        if self.coder is None:
            return 0, 0
        lo = self.coder.exact_first
        ready = end - self.coder.exact_last
        return lo, ready - max(0, ready - lo) % self.coder.granularity

    def next_blocks(self, end: int) -> tuple[int, int]:
        """As `whole_blocks`, but only those that were not given out before."""
        lo, hi = self.whole_blocks(end)
        lo = max(lo, self._done)
        self.mark(hi)
        return lo, hi

    def mark(self, hi: int) -> None:
        """Positions below `hi` are not given out by `next_blocks` again."""
        self._done = max(self._done, hi)

    def code(self, lo: int, hi: int, predictors: torch.Tensor | None = None) -> torch.Tensor:
        """Positions lo … hi − 1 of all windows as the codec gives them back, [B, h, hi − lo, d].

        `predictors` [B, predictor heads, hi − lo, d]: what the decoder has of the streams that the
        coder predicts from.
        """
        x = self.exact[..., lo:hi, :]
        if self.coder is None or self.coder.lossless:
            return x
        result = self._coded(x, lo, predictors, keep=True)
        self.mark(hi)
        return result

    def _coded(
        self, x: torch.Tensor, lo: int, predictors: torch.Tensor | None, *, keep: bool = False
    ) -> torch.Tensor:
        """Exact states [B, h, n, d] from position `lo` on as the codec gives them back, in their
        type.
        """
        if self.coder is None or self.coder.lossless:
            return x
        values, rotation = x, None
        if self.key[1] == "k" and self.coder.before_rope and self._rotary:
            rotation = self._rotary.at(self.key[0], lo, lo + x.shape[-2])
            values = rotation.remove(values)
        # Blocks are coded each on its own, so windows can follow one another.
        near = None if predictors is None else _folded(predictors)
        result = (
            self.coder.reconstruct(_folded(values), near)
            .unflatten(1, (x.shape[0], -1))
            .transpose(0, 1)
        )
        if keep:
            self._latest = (lo, result)
        return (result if rotation is None else rotation.apply(result)).to(x.dtype)

    def decoded(self, lo: int, hi: int) -> torch.Tensor:
        """What the decoder has of positions lo … hi − 1 when others predict from them, keys before
        RoPE, float32.

        Coded ones must be the latest that were coded; ValueError where they are not.
        """
        if self.coder is None or self.coder.lossless:
            return self._before_rope(self.exact[..., lo:hi, :].float(), lo)
        start, states = self._latest or (hi, None)
        if states is None or lo < start or hi > start + states.shape[-2]:
            raise ValueError(f"positions {lo} to {hi} of {self.key} are not coded yet")
        return states[..., lo - start : hi - start, :]

    def forget(self) -> None:
        """Nothing predicts from what was coded last any more."""
        self._latest = None

    def _before_rope(self, x: torch.Tensor, lo: int) -> torch.Tensor:
        if self.key[1] == "v" or not self._rotary:
            return x
        return self._rotary.at(self.key[0], lo, lo + x.shape[-2]).remove(x)

    def facts(
        self,
        window: int,
        start: int,
        predictors: torch.Tensor | None = None,
        read: torch.Tensor | None = None,
    ) -> tuple[StreamFacts, torch.Tensor]:
        """The real stream of one window's tokens from `start` on, encoded and decoded again, and
        what came back.

        `predictors` [predictor heads, tokens, d] is what came back of the streams that the coder
        predicts from; keys before RoPE. `read` [h, tokens, d] is what the cache holds of the window
        from `start` on; None: what `code` makes of it now.
        """
        x = self.exact[window, :, start:, :]
        values = x.float()
        exact = x.numel() * BF16_BYTES
        if self.coder is None:
            found = StreamFacts(exact, exact, float(values.square().sum()), 0.0, "")
            return found, self._before_rope(values, start)
        if self.key[1] == "k" and self.coder.before_rope and self._rotary:
            x = values = self._rotary.at(self.key[0], start, start + x.shape[-2]).remove(values)
        stream = self.coder.encode(x, predictors)
        back = self.coder.decode(stream, predictors=predictors).to(values.device)
        found = StreamFacts(
            len(stream),
            exact,
            float(values.square().sum()),
            float((values - back).square().sum()),
            sha256(stream).hexdigest(),
            self._apart(window, start, back, read, predictors),
        )
        return found, back if self.coder.before_rope else self._before_rope(back, start)

    def _apart(
        self,
        window: int,
        start: int,
        back: torch.Tensor,
        read: torch.Tensor | None,
        predictors: torch.Tensor | None,
    ) -> float:
        """Σ(r − x̂)² of the tokens whose stream can be compared with what attention read.

        A coder that predicts falls on other levels wherever a side differs in a last bit, as on a
        GPU with the company of a window, and is as good there: of its coded tokens (‖r − x‖ − ‖x̂ −
        x‖)² counts, which is never more. At the end of a window the stream codes a block that is
        not full, and tokens that have just ceased to be recent, which attention still read as they
        came: these are left out, as are blocks of a sliding layer, which begin elsewhere in its
        stream.
        """
        if (coder := self.coder) is None or (start and coder.granularity > 1):
            return 0.0
        x = self.exact[window, :, start:, :]
        first, tokens = coder.exact_first, x.shape[1]
        done = (self.whole_blocks(self.length)[1] if read is None else self._done) - start
        done = tokens if coder.lossless else done
        if read is None and done > first:
            read = x.clone()
            near = None if predictors is None else predictors[None, :, first:done]
            read[:, first:done] = self._coded(x[None, :, first:done], start + first, near)[0]
        elif read is None:
            read = x
        if self.key[1] == "k" and coder.before_rope and self._rotary:
            back = self._rotary.at(self.key[0], start, start + tokens).apply(back)
        # A sliding layer that let go of the first tokens keeps as many others exact in its stream.
        from_ = first if start else 0
        parts = [(from_, done), (max(done, tokens - coder.exact_last), tokens)]
        held, wanted = read.float(), back.to(x.dtype).to(read.dtype).float()
        if coder.predictor_keys and from_ < done:
            errors = [
                float((r[:, from_:done] - x[:, from_:done].float()).square().sum())
                for r in (held, wanted)
            ]
            found, parts = (sqrt(errors[0]) - sqrt(errors[1])) ** 2, parts[1:]
        else:
            found = 0.0
        return found + sum(
            float((held[:, lo:hi] - wanted[:, lo:hi]).square().sum()) for lo, hi in parts if lo < hi
        )


def facts_of_window(
    tracks: Mapping[Key, LiveStream],
    window: int,
    starts: Mapping[Key, int],
    read: Mapping[Key, torch.Tensor] | None = None,
) -> Iterator[tuple[Key, StreamFacts]]:
    """The real streams of one window, each stream's tokens from its start on, predicted from what
    came back of others.

    `read` is what the cache holds of the streams' tokens from their starts on, where the caller has
    it.
    """
    import torch

    needed = {source for track in tracks.values() for source in track.predictor_keys}
    decoded: dict[Key, torch.Tensor] = {}
    # In this order the sides of a stream come before it.
    for key in sorted(tracks):
        track = tracks[key]
        parts = [
            decoded[source][:, starts[key] - starts[source] :] for source in track.predictor_keys
        ]
        predictors, held = torch.cat(parts) if parts else None, (read or {}).get(key)
        found, back = track.facts(window, starts[key], predictors, held)
        yield key, found
        if key in needed:
            decoded[key] = back


def _folded(x: torch.Tensor) -> torch.Tensor:
    """[B, h, n, d] → [h, B · n, d]."""
    return x.transpose(0, 1).flatten(1, 2)
