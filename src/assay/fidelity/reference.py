"""The reference's side of a comparison: its windows, its rows, its floors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from assay.engines.scoring import ScoringEngine, TokenizerFacts, Window
from assay.errors import AssayError
from assay.fidelity.breakdown.floors import Floors
from assay.fidelity.breakdown.greedy import Continued
from assay.fidelity.names import fingerprint
from assay.fidelity.plan import Plan
from assay.fidelity.routing import Routing
from assay.fidelity.score import ReferenceRows
from assay.fidelity.text.own import OwnText
from assay.fidelity.text.sources import SELF, Text, read_text
from assay.fidelity.windows import available_windows, blocks_of, cut_windows, places_of


@dataclass
class Reference:
    """A reference that has been scored, or that scores along (`engine` is then still open).

    `check(tokenizer, label)` raises AssayError unless a candidate's token ids mean the same.
    """

    windows: Sequence[Window]
    rows: ReferenceRows
    check: Callable[[TokenizerFacts, str], None]
    facts: Mapping[str, Any]
    text_facts: Mapping[str, Any]
    floors: Floors = field(default_factory=Floors)
    probe_ids: Sequence[int] | None = None
    """Its ids of the probe text (`assay.fidelity.text.tokenizer_proof`), None where they are
    unknown.
    """
    greedy: Continued = field(
        default_factory=lambda: Continued(reason="a stored reference has no model")
    )
    """Its greedy continuations, where the plan asks for them."""
    engine: ScoringEngine | None = None
    find_head: Callable[[Any], None] = lambda engine: None
    """Told each candidate's engine before it scores: a pack without an output head takes the
    candidate's.
    """
    model_sha256: Mapping[str, str] = field(default_factory=dict)
    """Digests of the files of its model, by which a stranger's copy is known as the same; empty
    where that is unknown.
    """
    fingerprint: str = ""
    """`identity.fingerprint` of what scored it; empty where that is unknown."""
    routing: Routing | None = None
    """What its routers choose, where the plan asks for it."""
    plan: Plan | None = None
    """The plan with as many windows as a budget allows, None where it is as it was."""
    floors_later: tuple[float, Callable[[], Floors]] | None = None
    """Seconds that the floors will take, and what measures them; None where they are measured or
    not wanted.
    """

    def blocks(self, count: int) -> list[int]:
        """The cluster of each of the first windows; a store of version 0.1 has its windows one
        after the other.
        """
        places = self.text_facts.get("places") or range(len(self.windows))
        return blocks_of(places[:count])

    def is_same(self, spec: str, facts: Mapping[str, Any]) -> bool:
        """Whether `spec`, whose engine says `facts` of itself, is the reference itself: the same
        files run the same way.
        """
        if self.fingerprint and fingerprint(spec) == self.fingerprint:
            return True
        own = {name: value for name, value in self.facts.items() if name not in ("label", "states")}
        return bool(self.model_sha256) and own == facts and model_digests(spec) == self.model_sha256

    def close(self) -> None:
        """Close the engine, where one is still open."""
        if self.engine:
            self.engine.close()
            self.engine = None


def plan_text(plan: Plan) -> Text | None:
    """The text that the plan names, None where the reference writes it; AssayError where it cannot
    be read.
    """
    return None if plan.text == (SELF,) else read_text(plan.text)


def plan_windows(
    plan: Plan, tokenizer: TokenizerFacts, own: OwnText | None = None, text: Text | None = None
) -> tuple[list[Window], dict[str, Any]]:
    """The windows of the plan's text (`own`, where the reference wrote it; `text`, where it has
    been read already), and what a result says of them.

    AssayError where there is no whole one.
    """
    text = own.text if own else text or read_text(plan.text)
    ids = tokenizer.encode(text.text)
    windows = cut_windows(ids, plan.cut, tokenizer.bos_id, plan.windows)
    return windows, {
        **text.describe(),
        **(own.origin if own else {}),
        "tokens": len(ids),
        "windows_available": available_windows(len(ids), plan.cut, tokenizer.bos_id),
        "windows_sha256": hash_of(windows),
        "places": places_of(len(ids), plan.cut, tokenizer.bos_id, plan.windows),
        "characters_per_token": len(text.text) / len(ids),
        "latin": text.is_latin,
        "bos_id": tokenizer.bos_id,
        "tokenizer_sha256": tokenizer.sha256,
    }


def hash_of(windows: Sequence[Window]) -> str:
    """One hash of all windows."""
    return hashlib.sha256("".join(w.sha256 for w in windows).encode()).hexdigest()


def tokenizer_check(sha256: str, vocab_size: int) -> Callable[[TokenizerFacts, str], None]:
    """The check that a candidate's vocabulary has this hash."""

    def check(candidate: TokenizerFacts, label: str) -> None:
        if candidate.sha256 != sha256:
            raise AssayError(
                f"{label} has another tokenizer than the reference: their vocabularies differ"
                f" ({candidate.vocab_size:,} and {vocab_size:,} entries, hashes"
                f" {candidate.sha256[:12]} and {sha256[:12]})",
                finding_id="fidelity.tokenizer_mismatch",
                remedy=(
                    "distributions over different tokens cannot be compared; give a candidate of"
                    " the same model"
                ),
            )

    return check


def size_check(
    vocab_size: int, windows: Sequence[Window], name: str
) -> Callable[[TokenizerFacts, str], None]:
    """What can be told of a candidate's tokenizer where the reference has only a number
    of tokens.
    """

    def check(candidate: TokenizerFacts, label: str) -> None:
        if (
            candidate.vocab_size > vocab_size
            or max(max(w.tokens) for w in windows) >= candidate.vocab_size
        ):
            raise AssayError(
                f"{label} has {candidate.vocab_size:,} tokens, {name} has {vocab_size:,}",
                finding_id="fidelity.tokenizer_mismatch",
                remedy="give a candidate of the same model",
            )

    return check


def model_digests(spec: str) -> dict[str, str]:
    """SHA-256 of the files of a model on this machine by their names; empty where the spec names
    none.
    """
    path = Path(spec.partition("?")[0].partition(":")[2]).expanduser()
    files = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
    found = {}
    for file in files:
        if file.is_file() and not file.name.startswith("."):
            with file.open("rb") as content:
                found[file.name] = hashlib.file_digest(content, "sha256").hexdigest()
    return found
