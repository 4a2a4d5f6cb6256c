"""SPEC strings: what they mean, that they survive, and what is said of wrong ones."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")

from assay.errors import UsageError
from assay_lab.kv.codecs.base import Capabilities, Codec
from assay_lab.kv.codecs.hadamard import Hadamard
from assay_lab.kv.codecs.samples import LayerStream
from assay_lab.kv.spec import (
    CODECS,
    WRAPPERS,
    codec_type,
    parse_recipe,
    parse_spec,
    with_parameters,
    wrapper_type,
)


def test_both_streams() -> None:
    pair = parse_spec("prerope+mean+sinks(n=4)+hadamard(bits=5)")
    assert pair.k is not None and pair.v is not None
    assert pair.k.before_rope and not pair.v.before_rope
    assert pair.k.exact_first == pair.v.exact_first == 4
    assert pair.k.codec == Hadamard(bits=5.0)


def test_streams_apart() -> None:
    pair = parse_spec(" k: prerope+hadamard(bits=4) ; v:fp8(format = e5m2)")
    assert str(pair) == "k:prerope+hadamard;v:fp8(format=e5m2)"
    assert parse_spec("k:hadamard").v is None


@pytest.mark.parametrize(
    "text",
    [
        "identity",
        "hadamard(bits=3.5, norm=error)",
        "kakeya(bits=2, outlier=2.5, published_norm=true)",
        "prerope+boundary(first=2)+sinks(n=8)+recent(n=16)+mean(of=block)+qprecond(ridge=0.01)+int(bits=2)",
        "k:prerope+pca(bits=2.5);v:pca(bits=2, coding=fixed)",
    ],
)
def test_round_trip(text: str) -> None:
    parsed = parse_spec(text)
    assert parse_spec(str(parsed)) == parsed


@pytest.mark.parametrize(
    ("text", "message", "remedy"),
    [
        ("hadamrd", "unknown codec 'hadamrd'", "did you mean 'hadamard'"),
        ("sink(n=4)+bf16", "unknown wrapper 'sink'", "did you mean 'sinks'"),
        ("hadamard(bit=4)", "no parameter 'bit'", "did you mean 'bits'"),
        ("bf16(bits=4)", "no parameter 'bits'", "has no parameters"),
        ("hadamard(bits=four)", "a number, not 'four'", ""),
        ("int(bits=4.5)", "a whole number", ""),
        ("int(bits=9)", "1 to 8", ""),
        ("fp8(format=e4m2)", "unknown format 'e4m2'", "did you mean 'e"),
        ("kakeya(published_norm=maybe)", "true or false", ""),
        ("hadamard(bits=4", "unbalanced", ""),
        ("hadamard(4)", "no name", ""),
        ("hadamard(bits=4, bits=5)", "given twice", ""),
        ("sinks", "unknown codec 'sinks'", "put a codec after it"),
        ("hadamard+mean", "unknown wrapper 'hadamard'", "a codec stands last"),
        ("k:bf16;k:bf16", "given twice", ""),
        ("q:bf16", "unknown stream 'q'", ""),
        ("k:bf16;bf16", "lacks its stream", ""),
        ("k:bf16;v:prerope+bf16", "prerope concerns keys", ""),
        ("", "no codec", ""),
        ("hadamard(bits=0.5)", "1 to 10", ""),
        ("lattice(q=1000)", "1 to 110", ""),
        ("pca(trellis=12)", "4, 8, 16, 32 states, not 12", "trellis=8"),
        ("pca(trellis=8, coding=fixed)", "codes every number alone", "coding=range"),
        ("pca(bits=2, step=0.1)", "step takes the place of bits", "leave out bits"),
        ("pca(step=0.1, bits=3)", "step takes the place of bits", "leave out bits"),
    ],
)
def test_wrong_specs(text: str, message: str, remedy: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_spec(text)
    assert message in str(caught.value)
    assert remedy in caught.value.remedy


def test_every_name_loads_and_knows_itself() -> None:
    for name in CODECS:
        assert codec_type(name).name == name and codec_type(name).summary
    for name in WRAPPERS:
        assert wrapper_type(name).name == name and wrapper_type(name).summary


def test_bits_beside_no_step() -> None:
    assert parse_spec("pca(bits=2, step=0)") == parse_spec("pca(bits=2)")
    stepped = parse_recipe("pca(step=0.1)").codec
    assert with_parameters(stepped, {"step": 0.2}) == parse_recipe("pca(step=0.2)").codec


def test_other_parameters_are_checked_too() -> None:
    recipe = parse_recipe("hadamard")
    assert with_parameters(recipe.codec, {"bits": 3.0}) == Hadamard(bits=3.0)
    with pytest.raises(UsageError):
        with_parameters(recipe.codec, {"bits": 99.0})
    assert LayerStream("k", 0, 1, 3, 64).width == 192


@pytest.mark.parametrize(
    ("spec", "token_by_token", "entropy_coded", "in_tier"),
    [
        ("hadamard(bits=4)", True, False, False),
        ("lattice", True, False, False),
        ("int", False, False, False),
        ("int(axis=token,residual=0)", True, False, False),
        ("kakeya", False, False, False),
        ("pca(bits=3)", True, True, True),
        ("prerope+sinks(n=4)+pca(bits=3)", True, True, True),
        ("pca(bits=3,trellis=8)", True, True, False),
        ("pca(bits=3,coding=fixed)", True, False, False),
        ("mean+pca(bits=3)", True, True, False),
        ("mean(of=block)+hadamard(bits=4)", False, False, False),
    ],
)
def test_a_codec_says_itself_what_it_can_do(
    spec: str, token_by_token: bool, entropy_coded: bool, in_tier: bool
) -> None:
    found = parse_recipe(spec).capabilities
    assert found.token_by_token is token_by_token
    assert found.entropy_coded is entropy_coded
    assert (not found.not_in_tier) is in_tier


def test_a_codec_of_a_plug_in_that_says_nothing_can_nothing() -> None:
    class Plain(Hadamard):
        name = "plain"
        capabilities = Codec.capabilities

    found = Plain().capabilities
    assert found == Capabilities(not_in_tier="plain is not entropy-coded")
