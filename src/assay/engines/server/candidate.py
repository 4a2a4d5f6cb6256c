"""A server as the candidate of a comparison: `http://host:8000?model=NAME&ids=20`.

A server gives log-probabilities of a few ids at each position of a prompt, so a comparison with it
bounds KL from below. It scores a prompt in one pass, its own way: what it reads of its KV cache on
that pass is its own affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from assay.engines import Capability, read_options
from assay.engines.scoring import GreedyStep, ScoreJob, ScoringPath, Window
from assay.engines.server.endpoint import without_credentials
from assay.engines.server.engine import ServerEngine
from assay.engines.server.topk import TopkLogprobs
from assay.errors import AssayError, UsageError

_EXAMPLE = "http://HOST:PORT, such as http://localhost:8000?model=NAME&ids=20"


_AT_ONCE = 16
"""Requests for the text of tokens that are under way at once."""


@dataclass(frozen=True)
class ServerSpec:
    """One model behind a server, and how it is asked."""

    url: str
    model: str | None = None
    ids: int = 20
    """Ids scored at each position; vLLM allows 20 unless it was started with more `--max-logprobs`.
    """
    api_key_env: str | None = None
    timeout: float = 300.0


def parse_server(spec: str) -> ServerSpec:
    """Read `http(s)://…?option=value&…`; UsageError on an unknown option or a value that makes no
    sense.
    """
    shown = without_credentials(spec)
    url, given = read_options(
        spec,
        "",
        ("model", "ids", "api_key_env", "timeout"),
        example=_EXAMPLE,
        what="server",
        shown=shown,
    )
    options = dict(given)
    try:
        ids, timeout = int(options.get("ids", 20)), float(options.get("timeout", 300.0))
    except ValueError:
        ids, timeout = 0, 0.0
    if ids < 2 or not timeout > 0:
        raise UsageError(
            f"{shown!r}: ids must be a whole number from 2 up, timeout a number of seconds above 0",
            remedy=f"write {_EXAMPLE}",
            finding_id="fidelity.usage",
        )
    return ServerSpec(url, options.get("model"), ids, options.get("api_key_env"), timeout)


class ServerCandidate:
    """Scores windows by a server, with the likeliest ids at each token. Safe to use from many
    threads.
    """

    def __init__(self, spec: ServerSpec, engine: ServerEngine) -> None:
        self.spec = spec
        self.engine = engine
        self._chosen_by = ""
        self._text = lru_cache(maxsize=2**18)(engine.detokenize)

    @classmethod
    def load(cls, spec: str) -> ServerCandidate:
        """Connect to the server that `spec` names; AssayError where none answers."""
        parsed = parse_server(spec)
        return cls(
            parsed,
            ServerEngine.connect(
                parsed.url, parsed.model, api_key_env=parsed.api_key_env, timeout=parsed.timeout
            ),
        )

    @property
    def ids(self) -> int:
        """How many ids are scored at each position."""
        return self.spec.ids

    @property
    def vocab_size(self) -> int | None:
        """Entries of its vocabulary, where its list of models says so."""
        return self.engine.vocab_size

    def describe(self) -> dict[str, Any]:
        """Kind, version, model and settings of the server, without its folders."""
        identity = self.engine.identity
        return {
            "engine": "server",
            "server": identity.kind,
            "version": identity.version,
            **identity.facts,
            "model": Path(self.engine.model).name,
            "max_model_len": self.engine.max_model_len,
            "ids": self.ids,
            "ids_chosen_by": self._chosen_by or None,
        }

    def require(self, job: ScoreJob, length: int) -> None:
        """AssayError where it scores no prompt of token ids, not by this path, or none
        that long.
        """
        where = f"{self.engine.url} ({self.engine.model})"
        if job.path is not ScoringPath.PREFILL:
            raise AssayError(
                f"{where} scores a prompt in one pass, not by the {job.path} path",
                finding_id="fidelity.missing_capability",
                remedy=(
                    "use --path prefill, or run the engine in process (vllm:MODEL with the server's"
                    " options)"
                ),
            )
        report = self.engine.capabilities
        for needed in (Capability.SCORE, Capability.TOKEN_IDS_PROMPT):
            report.require(needed, "a comparison (or run the engine in process: vllm:MODEL)")
        room = self.engine.max_model_len
        if room is not None and length + 1 > room:  # every request generates one token
            raise UsageError(
                f"{where} has room for {room} tokens, a window of {length} and one to generate need"
                f" {length + 1}",
                remedy=f"use --length {room - 1} or less, or serve it with a longer context",
                finding_id="fidelity.usage",
            )

    def score_topk(self, window: Window, topk: Sequence[Sequence[int]], first: int) -> TopkLogprobs:
        """Log-probabilities at the tokens `first` … of a window, of the given ids or of the
        server's likeliest.
        """
        scores = self.engine.topk_logprobs(window.tokens, topk, first)
        self._chosen_by = scores.chosen_by
        return scores

    def tokenize(self, text: str) -> Sequence[int]:
        """Token ids of a text, without special tokens; MissingCapability where it has no
        /tokenize.
        """
        return self.engine.tokenize(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; empty where the server has no /detokenize."""
        return self._text(tuple(map(int, ids)))

    def read_texts(self, ids: Sequence[int]) -> bool:
        """Ask for the texts of many single tokens, some at once, so that `decode` knows them; False
        if it cannot.
        """
        if not ids or not self.decode(ids[:8]):
            return False
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            list(pool.map(lambda token: self.decode((token,)), ids))
        return True

    def generate_greedy(
        self, prefixes: Sequence[tuple[int, ...]], count: int
    ) -> list[list[GreedyStep]]:
        """`count` greedy tokens after each prefix; AssayError where the server does not name its
        likeliest ids.
        """
        with ThreadPoolExecutor(len(prefixes)) as pool:
            return list(
                pool.map(lambda prefix: self.engine.generate_greedy(prefix, count), prefixes)
            )

    def close(self) -> None:
        """Close the connections."""
        self.engine.close()
