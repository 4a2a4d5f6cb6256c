"""SPEC strings: `prerope+mean+sinks(n=4)+hadamard(bits=5)`, `k:SPEC;v:SPEC`.

A SPEC names a codec with its parameters; wrappers come before it, outermost first. Without `k:`
and `v:` it holds for both streams, except that `prerope` concerns keys only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from importlib import import_module
from typing import Any, cast, get_args, get_origin, get_type_hints

from assay.errors import UsageError
from assay.plugins import load, names
from assay_lab.kv.codecs.base import Capabilities, Codec
from assay_lab.kv.codecs.placement import Placement, Wrapper
from assay_lab.kv.codecs.samples import LayerStream, Samples, Tables
from assay_lab.kv.stream_coder import FittedCodec

CODECS = {
    "identity": "identity:Identity",
    "bf16": "bf16:Bf16",
    "fp8": "fp8:Fp8",
    "int": "int_groups:IntGroups",
    "hadamard": "hadamard:Hadamard",
    "lattice": "lattice:Lattice",
    "kakeya": "kakeya.codec:Kakeya",
    "pca": "pca:Pca",
    "noise": "noise:Noise",
}
WRAPPERS = {
    "prerope": "placements:PreRope",
    "sinks": "placements:Sinks",
    "recent": "placements:Recent",
    "boundary": "placements:Boundary",
    "mean": "mean:Mean",
    "qprecond": "qprecond:QPrecond",
    "outliers": "outliers:Outliers",
}


def codec_type(name: str) -> type[Codec]:
    """The codec of that name; UsageError with the nearest name where there is none."""
    return _load(name, CODECS, "codec")


def wrapper_type(name: str) -> type[Wrapper | Placement]:
    """The wrapper of that name; UsageError with the nearest name where there is none."""
    return _load(name, WRAPPERS, "wrapper")


def did_you_mean(word: str, known: list[str]) -> str:
    """What to do about an unknown word."""
    near = get_close_matches(word, known, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"


def _load(name: str, known: dict[str, str], kind: str) -> type:
    if name not in known and kind == "codec" and (added := load("assay.codecs").get(name)):
        return cast("type", added)
    if name not in known:
        other = {"codec": WRAPPERS, "wrapper": CODECS}[kind]
        if name in other and kind == "wrapper":
            remedy = "a codec stands last, wrappers stand before it: sinks(n=4)+hadamard(bits=4)"
        elif name in other:
            remedy = f"put a codec after it: {name}+hadamard(bits=4)"
        else:
            remedy = did_you_mean(
                name, [*known, *(names("assay.codecs") if kind == "codec" else ())]
            )
        raise UsageError(f"unknown {kind} {name!r} in a SPEC", remedy=remedy, finding_id="kv.spec")
    module, _, attribute = known[name].partition(":")
    found: type = getattr(import_module(f"assay_lab.kv.codecs.{module}"), attribute)
    return found


_TERM = re.compile(r"\s*([A-Za-z_][\w-]*)\s*(?:\((.*)\))?\s*", re.DOTALL)
_EXAMPLE = "write it like sinks(n=4)+hadamard(bits=4), or k:SPEC;v:SPEC"


@dataclass(frozen=True)
class Recipe:
    """A codec and what is around it, for one stream."""

    around: tuple[Placement | Wrapper, ...]
    codec: Codec

    @property
    def before_rope(self) -> bool:
        """Whether keys are coded as they are before RoPE."""
        return any(w.before_rope for w in self._placements())

    @property
    def exact_first(self) -> int:
        """Tokens at the start of a sequence that stay exact."""
        return max((w.exact_first() for w in self._placements()), default=0)

    @property
    def exact_last(self) -> int:
        """Tokens at the end of a sequence that stay exact."""
        return max((w.exact_last() for w in self._placements()), default=0)

    @property
    def capabilities(self) -> Capabilities:
        """What the codec and all that is around it can do together."""
        parts = [part.capabilities for part in (self.codec, *self.around)]
        around = [w for w, c in zip(self.around, parts[1:], strict=True) if c.not_in_tier]
        why = parts[0].not_in_tier
        if around and not why:
            name = around[0].name if len(self.around) == 1 else str(self)
            why = f"{name} is around the codec"
        return Capabilities(all(p.token_by_token for p in parts), parts[0].entropy_coded, why)

    def fit(self, samples: Samples) -> FittedCodec:
        """Fitted to one site: the exact tokens are not learnt from. AssayError where samples are
        missing.
        """
        samples = _without_first(samples, self.exact_first)
        chain = self._chain(samples.site)
        return self._fitted(samples.site, chain.fit(samples), samples.predictor_keys)

    def predictor_keys(self, site: LayerStream) -> tuple[tuple[int, str], ...]:
        """The streams (layer, stream) that its codec predicts from at a site."""
        return (
            ()
            if any(w.skips(site) for w in self._placements())
            else self.codec.predictor_keys(site)
        )

    def restore(self, site: LayerStream, tables: Tables) -> FittedCodec:
        """Fitted from kept tables."""
        return self._fitted(
            site, self._chain(site).restore(site, tables), self.predictor_keys(site)
        )

    def _placements(self) -> list[Placement]:
        return [w for w in self.around if isinstance(w, Placement)]

    def _chain(self, site: LayerStream) -> Codec:
        if any(w.skips(site) for w in self._placements()):
            return codec_type("identity")()
        chain = self.codec
        for wrapper in reversed(self.around):
            if isinstance(wrapper, Wrapper):
                chain = _Wrapped(wrapper, chain)
        return chain

    def _fitted(
        self, site: LayerStream, coder: Any, predictor_keys: tuple[tuple[int, str], ...]
    ) -> FittedCodec:
        before = self.before_rope and site.stream == "k"
        return FittedCodec(
            str(self), coder, self.exact_first, self.exact_last, before, predictor_keys
        )

    def __str__(self) -> str:
        return "+".join(str(part) for part in (*self.around, self.codec))


@dataclass(frozen=True)
class _Wrapped(Codec):
    """A wrapper with what is inside it, as one codec."""

    wrapper: Wrapper
    inner: Codec

    def fit(self, samples: Samples) -> Any:
        return self.wrapper.wrap(self.inner, samples)

    def restore(self, site: LayerStream, tables: Tables) -> Any:
        return self.wrapper.rewrap(self.inner, site, tables)


@dataclass(frozen=True)
class KvSpec:
    """The recipes of both streams; None where a stream stays exact."""

    k: Recipe | None
    v: Recipe | None

    def of(self, stream: str) -> Recipe | None:
        """The recipe of stream `k` or `v`."""
        return {"k": self.k, "v": self.v}[stream]

    @property
    def changes_nothing(self) -> bool:
        """Whether each stream stays exact or is coded by identity, in any model."""
        return all(r is None or r.codec.name == "identity" for r in (self.k, self.v))

    @property
    def token_by_token(self) -> bool:
        """Whether tokens can be fed together: each is coded alone, and none stays exact because it
        is recent.
        """
        return all(
            recipe is None or (recipe.capabilities.token_by_token and recipe.exact_last == 0)
            for recipe in (self.k, self.v)
        )

    def check_ranks(self, tensor: int, stages: int) -> None:
        """UsageError where ranks would split what is coded together: heads of a layer, or layers
        that predict from others.
        """
        for recipe in filter(None, (self.k, self.v)):
            joint = next(
                (part for part in (recipe.codec, *recipe.around) if part.joins_heads), None
            )
            across = any(
                layer != 1
                for stream in ("k", "v")
                for layer, _ in recipe.codec.predictor_keys(LayerStream(stream, 1, 2, 1, 1))
            )
            if tensor > 1 and joint is not None:
                what = (
                    f"{joint} codes all KV heads of a layer together, and each of {tensor} ranks"
                    " has a part of them"
                )
            elif stages > 1 and across:
                what = (
                    f"{recipe.codec} predicts from the layer before, which another of {stages}"
                    " pipeline stages may have"
                )
            else:
                continue
            raise UsageError(
                what,
                remedy=(
                    "measure it with one rank, or take a codec of single heads (fp8, int, hadamard,"
                    " lattice, kakeya)"
                ),
                finding_id="kv.usage",
            )

    def require(self, streams: str) -> None:
        """UsageError where it codes none of `streams` (`kv`, `k` or `v`): all would stay exact."""
        if not any(self.of(stream) for stream in streams):
            raise UsageError(
                f"{self} codes nothing of the stream {streams}",
                remedy="name another --stream",
                finding_id="kv.usage",
            )

    def __str__(self) -> str:
        if (
            self.k is not None
            and self.v is not None
            and str(_without_prerope(self.k)) == str(self.v)
        ):
            return str(self.k)
        return ";".join(f"{s}:{r}" for s, r in (("k", self.k), ("v", self.v)) if r is not None)


def parse_spec(text: str) -> KvSpec:
    """A SPEC as written on a command line; UsageError says what is wrong and what was meant."""
    streams: dict[str, Recipe] = {}
    for part in text.split(";"):
        head, colon, rest = part.partition(":")
        if not colon:
            if ";" in text:
                raise _error(f"{part.strip()!r} lacks its stream", "begin each part with k: or v:")
            both = parse_recipe(part)
            return KvSpec(both, _without_prerope(both))
        stream = head.strip().lower()
        if stream not in ("k", "v"):
            raise _error(
                f"unknown stream {head.strip()!r}", "k:SPEC is for keys, v:SPEC for values"
            )
        if stream in streams:
            raise _error(f"stream {stream!r} is given twice", _EXAMPLE)
        streams[stream] = parse_recipe(rest)
    value = streams.get("v")
    if value is not None and value.before_rope:
        raise _error("prerope concerns keys, but stands under v:", "leave it out there")
    return KvSpec(streams.get("k"), value)


def parse_recipe(text: str) -> Recipe:
    """The SPEC of one stream."""
    terms = [_term(t) for t in _split(text, "+")]
    around = []
    for name, parameters in terms[:-1]:
        wrapper = _build(wrapper_type(name), parameters)
        around.append(wrapper)
    name, parameters = terms[-1]
    return Recipe(tuple(around), _build(codec_type(name), parameters))


def with_parameters(codec: Codec, parameters: Mapping[str, Any]) -> Codec:
    """The same codec with other values of some parameters, checked like those of a SPEC."""
    given = {f.name: getattr(codec, f.name) for f in fields(codec)}
    changed: Codec = _build(type(codec), {**given, **parameters})
    return changed


def _without_prerope(recipe: Recipe) -> Recipe:
    return Recipe(
        tuple(w for w in recipe.around if not (isinstance(w, Placement) and w.before_rope)),
        recipe.codec,
    )


def _without_first(samples: Samples, first: int) -> Samples:
    if samples.x is None or samples.positions is None or not first:
        return samples
    keep = samples.positions >= first
    predictors = None if samples.predictors is None else samples.predictors[:, keep]
    return replace(
        samples, x=samples.x[:, keep], positions=samples.positions[keep], predictors=predictors
    )


def _split(text: str, separator: str) -> list[str]:
    """Split outside parentheses."""
    parts, depth = [""], 0
    for character in text:
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == separator and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    if depth:
        raise _error(f"unbalanced parentheses in {text.strip()!r}", _EXAMPLE)
    return parts


def _term(text: str) -> tuple[str, dict[str, str]]:
    found = _TERM.fullmatch(text)
    if not found:
        raise _error(f"{text.strip()!r} is no codec with parameters", _EXAMPLE)
    parameters: dict[str, str] = {}
    for item in _split(found[2] or "", ","):
        if not item.strip():
            continue
        key, equals, value = (s.strip() for s in item.partition("="))
        if not equals:
            raise _error(
                f"{item.strip()!r} in {found[1]}(…) has no name", f"{found[1]}(name=value)"
            )
        if key in parameters:
            raise _error(f"{key} is given twice in {found[1]}(…)", _EXAMPLE)
        parameters[key] = value
    return found[1], parameters


def _build(kind: type[Any], parameters: Mapping[str, Any]) -> Any:
    hints = get_type_hints(kind)
    known = [f.name for f in fields(kind)]
    values = {}
    for key, value in parameters.items():
        if key not in known:
            remedy = did_you_mean(key, known) if known else f"{kind.name} has no parameters"
            raise _error(f"{kind.name} has no parameter {key!r}", remedy)
        values[key] = _value(kind, key, value, hints[key]) if isinstance(value, str) else value
    for one, other in getattr(kind, "instead", {}).items():
        if values.get(one) and isinstance(parameters.get(other), str):
            raise _error(
                f"{kind.name}: {one} takes the place of {other}", f"leave out {other}, or {one}"
            )
    return kind(**values)


def _value(kind: type[Any], key: str, text: str, hint: Any) -> Any:
    words = {"true": True, "false": False}
    if hint is bool:
        if text.lower() not in words:
            raise _error(f"{kind.name}: {key} is true or false, not {text!r}", _EXAMPLE)
        return words[text.lower()]
    if hint in (int, float):
        try:
            return hint(text)
        except ValueError:
            what = "a whole number" if hint is int else "a number"
            raise _error(f"{kind.name}: {key} is {what}, not {text!r}", _EXAMPLE) from None
    choices = get_args(hint) if get_origin(hint) is not None else ()
    if choices and text not in choices:
        raise _error(f"{kind.name}: unknown {key} {text!r}", did_you_mean(text, list(choices)))
    return text


def _error(message: str, remedy: str) -> UsageError:
    return UsageError(f"SPEC: {message}", remedy=remedy, finding_id="kv.spec")
