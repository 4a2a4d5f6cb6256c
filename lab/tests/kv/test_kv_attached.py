"""`assay_lab.codec(SPEC).attached(model)` on plain models of transformers: what it does, undoes and
refuses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from assay.errors import AssayError, UsageError
from assay_lab import codec
from assay_lab.kv.resident import resident_cache

pytestmark = pytest.mark.engine

SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100,
}  # fmt: skip
IDS = torch.randint(1, 100, (2, 150), generator=torch.Generator().manual_seed(1))


def made(kind: str) -> Any:
    """A tiny random model; Qwen2's projections of queries, keys and values have biases."""
    torch.manual_seed(0)
    config = {"llama": transformers.LlamaConfig, "qwen2": transformers.Qwen2Config}[kind](**SMALL)
    net = {"llama": transformers.LlamaForCausalLM, "qwen2": transformers.Qwen2ForCausalLM}[kind](
        config
    )
    biases = [p for name, p in net.named_parameters() if name.endswith("bias")]
    assert bool(biases) == (kind == "qwen2")
    for bias in biases:
        torch.nn.init.normal_(bias)
    return net.eval()


def generated(net: Any, ids: Any = IDS, new: int = 12, **more: Any) -> Any:
    return net.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=new,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
        **more,
    )


def clean(net: Any) -> bool:
    decoder = net.get_decoder()
    return not decoder._forward_pre_hooks and not decoder._forward_hooks


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize(
    "spec", ["hadamard(bits=3)", "prerope+sinks(n=4)+hadamard(bits=4)", "kakeya(block=32)"]
)
def test_generation_reads_what_the_codec_made(kind: str, spec: str) -> None:
    net = made(kind)
    plain = generated(net)
    with codec(spec).attached(net) as coded:
        found = generated(net)
        by_hand = generated(net, past_key_values=None)
    assert torch.equal(found.logits[0], plain.logits[0])  # the prompt is read exactly
    assert not torch.equal(found.logits[1], plain.logits[1])
    assert torch.equal(found.sequences, by_hand.sequences)
    held = resident_cache(net, spec, length=200)
    again = generated(net, past_key_values=held)
    assert all(torch.equal(a, b) for a, b in zip(found.logits, again.logits, strict=True))
    assert coded.bytes.stored == held.resident_bytes and coded.bytes.exact == held.exact_bytes
    assert coded.bytes.ratio > 1.2 and coded.reads > 0
    assert clean(net)
    after = generated(net)
    assert all(torch.equal(a, b) for a, b in zip(plain.logits, after.logits, strict=True))
    assert type(after.past_key_values) is transformers.DynamicCache


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_the_identity_changes_nothing(kind: str) -> None:
    net = made(kind)
    plain = generated(net)
    with codec("identity").attached(net) as coded:
        found = generated(net)
    assert all(torch.equal(a, b) for a, b in zip(plain.logits, found.logits, strict=True))
    assert coded.reads > 0


def test_it_is_undone_after_an_exception_and_may_be_entered_again() -> None:
    net = made("llama")
    attached = codec("hadamard").attached(net)
    with pytest.raises(KeyError), attached:
        raise KeyError
    assert clean(net)
    with attached:
        generated(net)
    assert attached.reads > 0 and clean(net)


def test_a_second_codec_is_refused_while_one_is_attached() -> None:
    net, other = made("llama"), made("llama")
    with codec("hadamard").attached(net):
        with pytest.raises(UsageError, match="hadamard is attached to this model already"):
            codec("fp8").attached(net).__enter__()
        with codec("fp8").attached(other):
            generated(other)
        generated(net)
    assert clean(net) and clean(other)


def test_what_never_reads_the_cache_is_an_error() -> None:
    net = made("llama")
    with pytest.raises(AssayError, match="took no part") as caught, codec("hadamard").attached(net):
        net(input_ids=IDS)
    assert caught.value.finding_id == "fidelity.not_engaged"
    with (
        pytest.raises(AssayError, match="took no part"),
        codec("recent(n=500)+hadamard").attached(net),
    ):
        generated(net)
    with pytest.raises(AssayError, match="took no part"), codec("hadamard").attached(net):
        generated(net, use_cache=False)
    with codec("hadamard").attached(net):
        pass  # nothing ran
    assert clean(net)


def test_a_pass_without_a_cache_of_its_own_gets_one() -> None:
    net = made("llama")
    with torch.inference_mode(), codec("hadamard").attached(net) as coded:
        held = net(input_ids=IDS).past_key_values
        net(input_ids=IDS[:, :1], past_key_values=held)
        lazy = transformers.DynamicCache()
        net(input_ids=IDS, past_key_values=lazy)
        net(input_ids=IDS[:, :1], past_key_values=lazy)
    assert held.resident_bytes == lazy.resident_bytes == coded.bytes.stored


def test_other_caches_are_refused() -> None:
    net = made("llama")
    begun = net(input_ids=IDS).past_key_values
    static = transformers.StaticCache(config=net.config, max_cache_len=300)
    for held, said in ((begun, "150 tokens was begun without"), (static, "not StaticCache")):
        with pytest.raises(UsageError, match=said), codec("hadamard").attached(net):
            net(input_ids=IDS[:, :1], past_key_values=held)
    with pytest.raises(UsageError, match="no language model"):
        codec("hadamard").attached(torch.nn.Linear(2, 2))
    assert clean(net)


def test_sequences_longer_than_said_are_refused() -> None:
    net = made("llama")
    attached = codec("prerope+hadamard").attached(net, length=151)
    with pytest.raises(UsageError, match="made for 151 tokens"), attached:
        generated(net)
    assert clean(net)


def test_what_learns_needs_a_calibration() -> None:
    for spec in ("pca(bits=3)", "mean+hadamard", "k:hadamard;v:pca"):
        with pytest.raises(AssayError, match="learns from a calibration") as caught:
            codec(spec)
        assert "calibration=FILE" in caught.value.remedy
    with pytest.raises(AssayError):
        codec("pca(bits=3)", calibration="no-such-file")
    with pytest.raises(UsageError, match="unknown codec"):
        codec("hadamrd")


@pytest.mark.engine
def test_a_real_model_stays_close_with_many_bits_and_not_with_one(smollm2: Path) -> None:
    net = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    text = (
        "The lighthouse stood at the end of the bay, and nobody had climbed its stairs for years. "
        * 16
    )
    ids = transformers.AutoTokenizer.from_pretrained(smollm2)(text, return_tensors="pt")[
        "input_ids"
    ]
    plain = generated(net, ids, 3)
    kl, ratio = {}, {}
    for bits in (1, 8):
        with codec(f"prerope+sinks(n=4)+hadamard(bits={bits})").attached(net) as coded:
            found = generated(net, ids, 3)
        assert torch.equal(found.logits[0], plain.logits[0]) and coded.reads > 0
        p, q = (side.logits[1].double().log_softmax(-1) for side in (plain, found))
        kl[bits], ratio[bits] = float((p.exp() * (p - q)).sum()), coded.bytes.ratio
    assert 0 < kl[8] < 0.01 and kl[1] > 10 * kl[8]
    assert 1.5 < ratio[8] < ratio[1]
