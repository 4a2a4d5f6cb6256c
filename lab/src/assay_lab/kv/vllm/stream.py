"""One stream of one layer inside vLLM: what its requests cached, coded, and put back into pages.

Tokens of a request are coded in blocks of its own; the coder sees the due blocks of all requests
in one call. What a coder gives back for tokens of the running step goes to attention, which also
writes it into the cache; what it gives back for earlier tokens (a block that became full, a token
that is recent no longer, the prefix that *decode* left exact) must be written into the cache by
the caller.

A coder that predicts gets, for the tokens that it codes, what the lanes of its sides made of the
same ones; those lanes are fed before it in every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from assay.engines.vllm.steps import Request
from assay.errors import AssayError
from assay_lab.kv.coder_protocol import StreamCoder
from assay_lab.kv.growing import Growing
from assay_lab.kv.hook_plan import Mode
from assay_lab.kv.live_stream import LiveStream
from assay_lab.kv.stream_coder import Key

if TYPE_CHECKING:
    import torch


Spans = Mapping[str, tuple[int, int]]
"""First and past the last position, by the key of a request."""
Due = tuple[Request, int, int]
"""Positions from … to, past the last, of a request in the running step."""


@dataclass
class History:
    """Tokens of one request: as they came, and as the cache holds them. Tensors are [1, h, tokens,
    d] and [h, tokens, d].
    """

    track: LiveStream
    held: Growing = field(default_factory=Growing)
    replaced: torch.Tensor | None = None
    """What *snapshot* puts in place of all of them."""


class VllmStream:
    """One stream of one layer. `stateful`: earlier tokens may change, so that all are kept.

    `settles`: in *decode* none changes any more once the prefix has been coded, in this stream and
    in the other, which shares its slots, nor in those that predict from this one; then nothing more
    is kept. `predictors` are the lanes that the coder predicts from. `handed`: others predict from
    this one; `recorded`: from earlier tokens of it too.
    """

    def __init__(
        self,
        key: Key,
        coder: StreamCoder | None,
        mode: Mode,
        *,
        stateful: bool,
        settles: bool = False,
        predictors: Sequence[VllmStream] = (),
        handed: bool = False,
        recorded: bool = False,
    ) -> None:
        self.key = key
        self.coder = coder
        self.mode = mode
        self.stateful = stateful
        self.settles = settles and mode is Mode.DECODE
        self.predictors = tuple(predictors)
        self.handed = handed
        self.recorded = recorded
        self._exact = coder is None or coder.lossless
        self._step: torch.Tensor | None = None
        self._second = False
        self._made: list[tuple[tuple[Due, ...], torch.Tensor]] = []
        self.histories: dict[str, History] = {}
        self.fires = 0
        self.coded = 0
        """Tokens that were coded since `forget`."""

    def feed(
        self,
        requests: Sequence[Request],
        x: torch.Tensor,
        kept: Callable[[Request], bool],
        *,
        second: bool,
    ) -> tuple[torch.Tensor, Spans]:
        """What attention gets instead of `x` [tokens, h, d], and which earlier tokens of which
        requests are now others.

        `kept` names requests whose tokens are kept although nothing needs them; `second` is the
        second pass of *snapshot*.
        """
        self.release()
        if self.handed:
            self._step, self._second = x, second
        if second:
            return (self._replaced(requests, x), {}) if self.coder else (x, {})
        settled = (
            [r for r in requests if self._is_settled(r) and not kept(r)] if self.settles else []
        )
        if settled:
            x = self._settled(settled, x, everyone=len(settled) == len(requests))
            if len(settled) == len(requests):
                return x, {}
            alone = {r.key for r in settled}
            return self._feed([r for r in requests if r.key not in alone], x, kept)
        return self._feed(requests, x, kept)

    def _feed(
        self, requests: Sequence[Request], x: torch.Tensor, kept: Callable[[Request], bool]
    ) -> tuple[torch.Tensor, Spans]:
        for request in requests:
            if self.stateful or self.recorded or kept(request):
                rows = x[request.offset : request.offset + request.count].transpose(0, 1)
                self._history(request).track.append(rows.unsqueeze(0))
        changed: Spans = {}
        if self.coder is None or self.mode is Mode.SNAPSHOT:
            out = x
        elif self.stateful:
            out, changed = self._due(requests, x)
        else:
            out = self._at_once(requests, x)
        if self.stateful and self.mode is not Mode.SNAPSHOT:
            for request in requests:
                rows = out[request.offset : request.offset + request.count].transpose(0, 1)
                self.histories[request.key].held.append(rows)
        return out, changed

    def decoded(self, due: Sequence[Due]) -> torch.Tensor:
        """What a decoder has of these tokens, [h, all of them, d], float32: exact ones, or what was
        coded in this step.

        ValueError where they have not been coded in it.
        """
        import torch

        if self._exact:
            return torch.cat([self._exactly(*d) for d in due], dim=1).float()
        for ranges, result in self._made:
            if ranges == tuple(due):
                return result
        return torch.cat([self._made_of(*d) for d in due], dim=1)

    def release(self) -> None:
        """Nothing predicts from the running step any more."""
        self._step = None
        self._made.clear()

    def _exactly(self, request: Request, lo: int, hi: int) -> torch.Tensor:
        """Tokens as they came, in the first pass of *snapshot*."""
        if self._second or lo < request.start or self._step is None:
            return self.histories[request.key].track.exact[0, :, lo:hi]
        first = request.offset - request.start
        return self._step[first + lo : first + hi].transpose(0, 1)

    def _made_of(self, request: Request, lo: int, hi: int) -> torch.Tensor:
        for ranges, result in self._made:
            at = 0
            for other, first, last in ranges:
                if other.key == request.key and first <= lo and hi <= last:
                    return result[:, at + lo - first : at + hi - first]
                at += last - first
        raise ValueError(
            f"tokens {lo} to {hi} of request {request.key} are not coded yet in {self.key}"
        )

    def _is_settled(self, request: Request) -> bool:
        """Whether all earlier tokens of a request are what they stay, and its new ones are coded as
        they come.
        """
        if request.start <= request.prefix:
            return False
        if self.coder is None:
            return True
        found = self.histories.get(request.key)
        return (
            found is not None
            and found.track.done == request.start
            and request.start >= self.coder.exact_first
        )

    def _settled(
        self, requests: Sequence[Request], x: torch.Tensor, *, everyone: bool
    ) -> torch.Tensor:
        """Code the new tokens of settled requests, `everyone` where the step has no others."""
        if self.coder is None:
            return x
        for request in requests:
            self.histories[request.key].track.mark(request.end)
        total = requests[-1].offset + requests[-1].count
        rows = slice(0, total) if everyone else _rows_from(tuple(requests), 0, x.device)
        return self._coded_rows(x, rows, requests, 0)

    def forget(self, keys: Sequence[str] | None = None) -> None:
        """Drop what is kept of these requests, by default of all."""
        if keys is None:
            self.release()
            self.histories.clear()
            self.coded = 0
        for key in keys or ():
            self.histories.pop(key, None)

    def _history(self, request: Request) -> History:
        """The history of a request, whose next token is the first of the step. A request that
        begins again is new.
        """
        found = self.histories.get(request.key)
        if found is None or request.start == 0:
            found = History(LiveStream(self.key, self.coder, None))
        if found.track.length != request.start:
            raise AssayError(
                f"{found.track.length} tokens of request {request.key} have passed layer"
                f" {self.key[0]}, but it goes on at token {request.start}: some came from another"
                " request's cache",
                finding_id="kv.unsupported",
                remedy="switch prefix caching off",
            )
        self.histories[request.key] = found
        return found

    def _at_once(self, requests: Sequence[Request], x: torch.Tensor) -> torch.Tensor:
        """All tokens but sinks, each coded as it comes."""
        if self.coder is None:
            return x
        first = self.coder.exact_first
        total = requests[-1].offset + requests[-1].count
        if all(request.start >= first for request in requests):
            rows: torch.Tensor | slice = slice(0, total)
        else:
            rows = _rows_from(tuple(requests), first, x.device)
            if not rows.numel():
                return x
        return self._coded_rows(x, rows, requests, first)

    def _coded_rows(
        self, x: torch.Tensor, rows: torch.Tensor | slice, requests: Sequence[Request], first: int
    ) -> torch.Tensor:
        """`x` with these rows coded, each token alone: those of the requests that are not among
        their first ones.
        """
        due: list[Due] = []
        if self.predictors or self.handed:
            due = [(r, max(r.start, first), r.end) for r in requests if r.end > first]
        result = self._code(x[rows].transpose(0, 1), due).transpose(0, 1)
        if result.shape[0] == x.shape[0]:
            return result
        out = x.clone()
        out[rows] = result
        return out

    def _due(self, requests: Sequence[Request], x: torch.Tensor) -> tuple[torch.Tensor, Spans]:
        """Code what has become due of each request, in the cache and in the step."""
        import torch

        due = [
            (r, lo, hi)
            for r in requests
            for lo, hi in self._ranges(r, self.histories[r.key].track)
            if lo < hi
        ]
        if not due:
            return x, {}
        results = self._code(
            torch.cat([self.histories[r.key].track.exact[0, :, lo:hi] for r, lo, hi in due], 1), due
        )
        out, changed, done = x.clone(), dict[str, tuple[int, int]](), 0
        for request, lo, hi in due:
            result = results[:, done : done + hi - lo]
            done += hi - lo
            middle = min(hi, max(lo, request.start))
            if lo < middle:
                self.histories[request.key].held.states[:, lo:middle] = result[:, : middle - lo]
                before = changed.get(request.key, (lo, middle))
                changed[request.key] = min(lo, before[0]), max(middle, before[1])
            if middle < hi:
                row = request.offset + middle - request.start
                out[row : row + hi - middle] = result[:, middle - lo :].transpose(0, 1)
        return out, changed

    def _ranges(self, request: Request, track: LiveStream) -> list[tuple[int, int]]:
        """Positions of a request that are due: as the hook of transformers decides it."""
        if self.mode is Mode.INFORWARD:
            return [track.next_blocks(request.end)]
        if request.start < request.prefix or self.coder is None:
            return []
        ranges = [track.next_blocks(request.start)]
        if track.codes_at_once(max(request.start, self.coder.exact_first)):
            ranges.append((max(request.start, self.coder.exact_first), request.end))
            track.mark(request.end)
        return ranges

    def _replaced(self, requests: Sequence[Request], x: torch.Tensor) -> torch.Tensor:
        """The second pass of *snapshot*: what the first one captured, reconstructed once per
        request.
        """
        import torch

        histories = [self.histories[r.key] for r in requests]
        fresh = [h for h in histories if h.replaced is None]
        spans = [h.track.whole_blocks(h.track.length) for h in fresh]
        new = [r for r in requests if self.histories[r.key].replaced is None]
        due = [(r, lo, hi) for r, (lo, hi) in zip(new, spans, strict=True) if lo < hi]
        parts = [self.histories[r.key].track.exact[0, :, lo:hi] for r, lo, hi in due]
        results = self._code(torch.cat(parts, dim=1), due) if parts else None
        done = 0
        for history, (lo, hi) in zip(fresh, spans, strict=True):
            history.replaced = history.track.exact[0].clone()
            if results is not None and lo < hi:
                history.replaced[:, lo:hi] = results[:, done : done + hi - lo]
                done += hi - lo
        out = x.clone()
        for request, history in zip(requests, histories, strict=True):
            if history.replaced is not None:
                rows = history.replaced[:, request.start : request.end].transpose(0, 1)
                out[request.offset : request.offset + request.count] = rows
        return out

    def _code(self, x: torch.Tensor, due: Sequence[Due]) -> torch.Tensor:
        """Whole blocks [h, tokens, d] as the codec gives them back, in the same type; `due` says
        which tokens they are.
        """
        import torch

        self.fires += 1
        self.coded += x.shape[1]
        if self.coder is None or self.coder.lossless:
            return x
        near = (
            torch.cat([source.decoded(due) for source in self.predictors])
            if self.predictors
            else None
        )
        result = self.coder.reconstruct(x, near)
        if self.handed:
            self._made.append((tuple(due), result))
        return result.to(x.dtype)


@lru_cache(maxsize=8)
def _rows_from(requests: tuple[Request, ...], first: int, device: torch.device) -> torch.Tensor:
    """Rows of a step whose tokens are not among the first of their request; all layers ask for the
    same ones.
    """
    import numpy as np
    import torch

    spans = [
        np.arange(r.offset + min(r.count, max(0, first - r.start)), r.offset + r.count)
        for r in requests
    ]
    return torch.from_numpy(np.concatenate(spans)).to(device)
