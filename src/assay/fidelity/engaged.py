"""Did the thing under test take part in the numbers?

A comparison whose differences are all exactly zero has compared a thing with itself: one-shot
prefill never reads a KV cache, a hook may never have fired, a flag may have been ignored. Such a
result is an error unless sameness was what was asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from assay.engines.scoring import Engagement, ScoringPath
from assay.errors import AssayError

if TYPE_CHECKING:
    pass
from assay.fidelity.observation import WindowObservation


@dataclass(frozen=True)
class Engaged:
    """What is known of the candidate's part. `zero_share` is the share of tokens with exactly no
    difference.
    """

    ok: bool
    fires: int | None
    bytes_read: int | None
    zero_share: float

    def to_json(self) -> dict[str, Any]:
        """As the object `results.engaged`."""
        return {
            "ok": self.ok,
            "fires": self.fires,
            "bytes_read": self.bytes_read,
            "zero_share": self.zero_share,
        }


def zero_share(seen: Sequence[WindowObservation]) -> float:
    """Share of scored tokens whose NLL and KL differ by exactly nothing."""
    total = sum(w.kl.size for w in seen)
    zero = sum(int(((w.kl == 0) & (w.dnll == 0)).sum()) for w in seen)
    return zero / total if total else 0.0


def engaged(
    seen: Sequence[WindowObservation],
    engagement: Engagement,
    *,
    path: ScoringPath,
    hooked: bool,
    same: bool,
    label: str,
) -> Engaged:
    """The facts, or AssayError `fidelity.not_engaged`.

    `same` says that the candidate is the reference itself or an identity; `hooked` that a hook had
    to fire.
    """
    share = zero_share(seen)
    unread = path is not ScoringPath.PREFILL and engagement.bytes_read == 0
    silent = hooked and not engagement.fires
    ok = same or not (share == 1.0 or unread or silent)
    if ok:
        return Engaged(True, engagement.fires, engagement.bytes_read, share)
    if silent:
        why = "its hook never fired"
    elif unread:
        why = f"the {path} path read no cache"
    else:
        why = "every difference is exactly zero"
    raise AssayError(
        f"{label} took no part in the numbers: {why}",
        finding_id="fidelity.not_engaged",
        remedy=(
            "give longer windows (--length): tokens that a codec keeps exact, the first and the"
            " recent, may be all there are"
            if silent
            else (
                "score through the decode path (--path decode), or compare the reference with"
                " itself if that is meant"
            )
        ),
        evidence={
            "zero_share": share,
            "fires": engagement.fires,
            "bytes_read": engagement.bytes_read,
        },
    )
