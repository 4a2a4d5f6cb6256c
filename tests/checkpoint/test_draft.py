"""A separate draft against its target, from headers alone."""

from __future__ import annotations

from typing import Any

import pytest

from assay.checkpoint.draft import check_draft, draft_kind, hidden_states, is_draft
from assay.checkpoint.subject import Checkpoint
from checkpoint.head_samples import Shapes, checkpoint, family, rows

LAYER = """
{at}.self_attn.q_proj.weight A {reads}*H
{at}.self_attn.k_proj.weight K {reads}*H
{at}.self_attn.v_proj.weight K {reads}*H
{at}.self_attn.o_proj.weight H A
{at}.mlp.gate_proj.weight I H
{at}.mlp.up_proj.weight I H
{at}.mlp.down_proj.weight H I
"""
DIMENSIONS = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "num_hidden_layers": 1,
}


def table(text: str, **words: Any) -> Shapes:
    return {name: ("BF16", shape) for name, shape in rows(text.format(**words))}


def eagle3(
    config: dict[str, Any] | None = None, **tensors: tuple[str, tuple[int, ...]]
) -> Checkpoint:
    """EAGLE-3 for a target of hidden size 64 and 320 tokens."""
    settings = (
        DIMENSIONS
        | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 96}
        | (config or {})
    )
    shapes = table(
        "fc.weight H 3*H\nnorm.weight H\nlm_head.weight 96 H\n" + LAYER, at="midlayer", reads=2
    )
    norms = ("hidden_norm", "input_layernorm", "post_attention_layernorm")
    shapes |= {f"midlayer.{n}.weight": ("BF16", (64,)) for n in norms}
    shapes |= {"d2t": ("I64", (96,)), "t2d": ("BOOL", (320,))}
    changed = {name.replace("__", "."): value for name, value in tensors.items()}
    return checkpoint(settings, {n: t for n, t in (shapes | changed).items() if t[1] != ()})


def eagle(config: dict[str, Any] | None = None, fc: tuple[int, int] = (64, 128)) -> Checkpoint:
    settings = DIMENSIONS | {"architectures": ["EagleLlamaForCausalLM"]} | (config or {})
    return checkpoint(settings, table(LAYER, at="layers.0", reads=1) | {"fc.weight": ("BF16", fc)})


def target(**config: Any) -> Checkpoint:
    return checkpoint(
        DIMENSIONS | {"num_hidden_layers": 4} | config, {"model.norm.weight": ("BF16", (64,))}
    )


GONE: tuple[str, tuple[int, ...]] = ("BF16", ())


@pytest.mark.parametrize("draft", [eagle3(), eagle()], ids=["eagle-3", "eagle"])
def test_a_fitting_pair_raises_nothing(draft: Checkpoint) -> None:
    assert is_draft(draft)
    assert list(check_draft(draft, target())) == []
    assert list(check_draft(draft, None)) == []


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        (eagle3(fc__weight=("BF16", (64, 128))), "fc.weight"),
        (
            eagle3({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}}),
            "4 hidden states",
        ),
        (eagle3(d2t=("I64", (95,))), "d2t"),
        (eagle3(t2d=("BOOL", (300,))), "t2d"),
        (eagle3(d2t=GONE), "no d2t map"),
        (eagle3(lm_head__weight=("BF16", (320, 64))), "lm_head.weight"),
        (eagle3(midlayer__self_attn__q_proj__weight=("BF16", (64, 64))), "reads 64"),
        (eagle3({"vocab_size": 400}, t2d=("BOOL", (320,))), "vocab_size 400"),
        (eagle3({"target_hidden_size": 128}), "hidden_size 128"),
        (eagle(fc=(64, 64)), "embedding and hidden state"),
        (eagle({"hidden_size": 32}), "hidden states of 32"),
    ],
)
def test_what_does_not_fit_is_named(draft: Checkpoint, says: str) -> None:
    found = list(check_draft(draft, target()))
    assert found
    assert {f.id for f in found} == {"checkpoint.draft_mismatch"}
    assert any(says in f.title for f in found), [f.title for f in found]


def test_a_tensor_that_no_target_shares_must_be_there() -> None:
    found = list(check_draft(eagle3(midlayer__hidden_norm__weight=GONE), target()))
    assert [(f.id, f.title) for f in found] == [
        ("checkpoint.tensor_missing", "the draft has no midlayer.hidden_norm")
    ]


def test_a_draft_of_another_width_may_read_a_wider_target() -> None:
    settings = {"target_hidden_size": 128}
    assert (
        list(check_draft(eagle3(settings, fc__weight=("BF16", (64, 384))), target(hidden_size=128)))
        == []
    )
    assert (
        list(check_draft(eagle3(settings, fc__weight=("BF16", (64, 384))), target(hidden_size=256)))
        != []
    )


def test_how_many_hidden_states_are_read() -> None:
    assert hidden_states({}, "eagle3") == 3
    assert hidden_states({"num_aux_hidden_states": 5}, "eagle3") == 5
    assert hidden_states({"eagle_aux_hidden_state_layer_ids": [2, 9]}, "eagle3") == 2
    assert hidden_states({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]}}, "eagle3") == 1
    assert hidden_states({"num_hidden_layers": 8}, "dflash") == 8
    assert (
        hidden_states(
            {"num_hidden_layers": 8, "dflash_config": {"target_layer_ids": [1, 2]}}, "dflash"
        )
        == 2
    )


def test_a_model_is_no_draft() -> None:
    config, backbone, head = family("qwen3_5")
    assert not is_draft(checkpoint(config, backbone, head))
    assert draft_kind(eagle3()) == "eagle3"
    assert draft_kind(eagle()) == "eagle"
    vision = DIMENSIONS | {"architectures": ["Eagle2_5_VLForConditionalGeneration"]}
    assert draft_kind(checkpoint(vision, {"model.norm.weight": ("BF16", (64,))})) is None


# DFlash and DSpark: fc reads the hidden states of the layers that the config lists.

FLASH = "fc.weight H {reads}*H\nhidden_norm.weight H\nnorm.weight H\n" + LAYER


def dflash(config: dict[str, Any] | None = None, *, reads: int = 3, hidden: int = 64) -> Checkpoint:
    settings = DIMENSIONS | {
        "architectures": ["DFlashDraftModel"], "num_target_layers": 4,
        "dflash_config": {"target_layer_ids": [0, 2, 3], "mask_token_id": 319},
    }  # fmt: skip
    shapes = {
        name: (kind, (shape[0], reads * hidden) if name == "fc.weight" else shape)
        for name, (kind, shape) in table(FLASH, at="layers.0", reads=1).items()
    }
    changed = settings | (config or {})
    return checkpoint({k: v for k, v in changed.items() if v is not ...}, shapes)


DSPARK = {"architectures": ["Qwen3DSparkModel"], "dflash_config": ..., "mask_token_id": 319}


@pytest.mark.parametrize(
    "draft",
    [
        dflash(),
        dflash({"architectures": ["Qwen3DFlashDraftModel"]}),
        dflash({"architectures": ["SomethingNew"]}),  # its settings say what it is
        dflash(
            {"dflash_config": {"mask_token_id": 3}, "num_hidden_layers": 1}, reads=1
        ),  # one state a layer
        dflash({"target_hidden_size": 96}, hidden=96),
        dflash(DSPARK | {"target_layer_ids": [1, 2, 3]}),
        dflash(DSPARK | {"dspark_target_layer_ids": [1, 3]}, reads=2),
        dflash(
            {"dflash_config": ..., "aux_hidden_state_layer_ids": [1, 3, 4], "mask_token_id": 7}
        ),  # counted from 1
    ],
)
def test_a_fitting_dflash_draft_raises_nothing(draft: Checkpoint) -> None:
    assert draft_kind(draft) in {"dflash", "dspark"}
    assert [f.title for f in check_draft(draft, None)] == []
    if "target_hidden_size" not in draft.config:
        assert [f.title for f in check_draft(draft, target())] == []


@pytest.mark.parametrize(
    ("draft", "says"),
    [
        (dflash(reads=2), "3 hidden states of 64"),
        (
            dflash({"dflash_config": {"target_layer_ids": [0, 2, 4]}}),
            "names layer 4 of a target with 4 layers",
        ),
        (dflash({"dflash_config": {"target_layer_ids": [0, 2, 2]}}), "twice"),
        (
            dflash({"dflash_config": {"target_layer_ids": [0, 2, 3], "mask_token_id": 320}}),
            "mask_token_id 320",
        ),
        (dflash({"num_target_layers": 36}), "num_hidden_layers 36, this target has 4"),
        (dflash({"dflash_config": ..., "aux_hidden_state_layer_ids": [1, 3, 5]}), "names layer 5"),
        (dflash(DSPARK | {"target_layer_ids": [1, 2, 9]}), "names layer 9"),
        (dflash({"num_hidden_layers": 2}), "1 layer of 2 not stored"),
    ],
)
def test_what_does_not_fit_a_dflash_draft_is_named(draft: Checkpoint, says: str) -> None:
    assert any(says in f.title for f in check_draft(draft, target())), [
        f.title for f in check_draft(draft, target())
    ]


# EAGLE-3 counts the embedding as 0, so a target of 4 layers has the ids 0 to 4.


@pytest.mark.parametrize(
    ("ids", "fits"),
    [([0, 1, 4], True), ([0, 1, 5], False), ([1, 2, 48], False), ([1, 1, 2], False)],
)
@pytest.mark.parametrize("place", ["top", "eagle_config"])
def test_layer_ids_are_those_of_the_target(ids: list[int], fits: bool, place: str) -> None:
    named = {"eagle_aux_hidden_state_layer_ids": ids}
    draft = eagle3(named if place == "top" else {"eagle_config": named})
    findings = list(check_draft(draft, target()))
    assert (findings == []) is fits
    assert {f.severity.value for f in findings} <= {"warning" if len(set(ids)) < 3 else "error"}
    if len(set(ids)) == 3:
        assert list(check_draft(draft, None)) == []  # nobody says how deep the target is
