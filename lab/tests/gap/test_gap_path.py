"""From engine to engine by steps of one change each; configurations and their keys."""

from __future__ import annotations

import pytest

from assay.engines.scoring import ScoreJob
from assay.errors import UsageError
from assay_lab.gap.configuration import Configuration, grouped, span, with_placement
from assay_lab.gap.engine_steps import engine_name, engine_steps
from assay_lab.gap.phases.switches import switches
from assay_lab.gap.plan import GapPlan, full_spec


def steps(reference: str, candidate: str, *dtypes: str | None) -> list[tuple[str, str]]:
    return [(s.name, s.engine) for s in engine_steps(reference, candidate, dtypes or (None, None))]


def test_within_one_engine_every_option_is_a_step() -> None:
    assert steps("hf:m?dtype=float32", "hf:m?attention=eager") == [
        ("engine.rounding", "hf:m"),
        ("engine.attention", "hf:m?attention=eager"),
    ]
    assert steps("hf:m?dtype=float32", "hf:m?kv_cache_dtype=fp8_e4m3") == [
        ("engine.rounding", "hf:m"),
        ("engine.cache", "hf:m?kv_cache_dtype=fp8_e4m3"),
    ]
    assert steps("vllm:m", "vllm:m?kv_cache_dtype=fp8&attention_backend=TRITON_ATTN") == [
        ("engine.attention", "vllm:m?attention_backend=TRITON_ATTN"),
        ("engine.cache", "vllm:m?kv_cache_dtype=fp8&attention_backend=TRITON_ATTN"),
    ]


def test_between_engines_the_number_format_comes_first() -> None:
    assert steps("hf:m?dtype=float32", "vllm:m", "float32", "bfloat16") == [
        ("engine.rounding", "hf:m?dtype=bfloat16"),
        ("engine.kernels", "vllm:m"),
    ]
    assert steps("hf:m", "vllm:m", "bfloat16", "bfloat16") == [("engine.kernels", "vllm:m")]


def test_between_engines_own_options_are_left_out_before_and_come_in_after_the_kernels() -> None:
    candidate = "vllm:q?max_model_len=256&kv_cache_dtype=fp8&attention_backend=TRITON_ATTN"
    assert steps(
        "hf:m?attention=eager&kv_cache_dtype=fp8_e5m2", candidate, "bfloat16", "bfloat16"
    ) == [
        ("engine.attention", "hf:m?kv_cache_dtype=fp8_e5m2"),
        ("engine.cache", "hf:m"),
        ("engine.kernels", "vllm:m?max_model_len=256"),
        ("engine.model", "vllm:q?max_model_len=256"),
        ("engine.attention.vllm", "vllm:q?max_model_len=256&attention_backend=TRITON_ATTN"),
        ("engine.cache.vllm", candidate),
    ]
    assert steps("hf:m", "gguf:m.gguf?n_ctx=64") == [("engine.kernels", "gguf:m.gguf?n_ctx=64")]


def test_another_checkpoint_and_other_settings_have_their_steps() -> None:
    assert [name for name, _ in steps("hf:a", "hf:b?weights=polar(bits=4)")] == [
        "engine.weights",
        "engine.model",
    ]
    assert [name for name, _ in steps("vllm:a", "vllm:a?max_num_seqs=4")] == ["engine.settings"]
    assert steps("hf:a", "hf:a") == [("engine.none", "hf:a")]


def test_the_last_step_leads_to_the_candidate_as_it_was_written() -> None:
    written = 'vllm:m?args={"hf_overrides":{"rope_theta":5000}}'
    assert steps("vllm:m", written)[-1] == ("engine.settings", written)
    assert str(engine_name(written)) == written
    assert (
        str(engine_name("hf:./m?weights=int(bits=4,group=128)"))
        == "hf:./m?weights=int(bits=4,group=128)"
    )


def test_a_folder_is_a_model_of_transformers() -> None:
    assert full_spec("./some/model?dtype=float32") == "hf:./some/model?dtype=float32"
    assert full_spec("vllm:m") == "vllm:m"
    assert engine_name("./some/model?dtype=float32") == engine_name("hf:./some/model?dtype=float32")


@pytest.mark.parametrize(
    "spec", ["gguf:m.gguf", "run:stored", "http://localhost:8000", "hf:", "vllm:?dtype=auto"]
)
def test_engines_without_codecs_are_refused_in_one_line(spec: str) -> None:
    with pytest.raises(UsageError) as caught:
        engine_name(spec)
    assert caught.value.finding_id == "gap.usage"
    assert "\n" not in str(caught.value)


def test_without_a_codec_llama_cpp_may_be_the_candidate() -> None:
    assert GapPlan("hf:m", "gguf:m.gguf").candidate == "gguf:m.gguf"
    for reference, candidate, said in (
        ("gguf:m.gguf", "hf:m", "name it second"),
        ("hf:m", "http://localhost:8000", "assay compare"),
    ):
        with pytest.raises(UsageError) as caught:
            GapPlan(reference, candidate)
        assert said in caught.value.remedy


@pytest.mark.parametrize(("layers", "groups"), [(30, 5), (30, 0), (7, 3), (3, 5), (1, 1)])
def test_groups_hold_every_layer_once_in_order(layers: int, groups: int) -> None:
    found = grouped(layers, groups)
    assert [layer for group in found for layer in group] == list(range(layers))
    assert len(found) == (layers if groups == 0 else min(groups, layers))
    sizes = [len(g) for g in found]
    assert max(sizes) - min(sizes) <= 1


def test_spans_and_placements_are_written_shortly() -> None:
    assert [span(s) for s in ((3,), (0, 1), (0, 1, 2), (0, 2, 4))] == ["3", "0,1", "0-2", "0,2,4"]
    assert with_placement("prerope+hadamard(bits=4)", "recent(n=8)").startswith(
        "k:recent(n=8)+prerope+hadamard"
    )
    assert with_placement("v:fp8", "recent(n=8)") == "v:recent(n=8)+fp8"


def test_facts_hold_what_changes_numbers_and_nothing_else() -> None:
    base = Configuration("hf:m", "inforward", "fp8")
    assert base.facts() == Configuration("hf:m", "inforward", "fp8").facts()
    others = [
        Configuration("hf:m", "snapshot", "fp8"),
        Configuration("hf:m", "inforward", "fp8", streams="k"),
        Configuration("hf:m", "inforward", "fp8", layers=(0,)),
        Configuration("hf:m", "inforward", "fp8", again=True),
        Configuration("hf:n", "inforward", "fp8"),
    ]
    assert len({str(c.facts()) for c in (base, *others)}) == 6
    # Without a codec in-forward and snapshot are one thing: prefill.
    assert Configuration("hf:m", "inforward").facts() == Configuration("hf:m", "snapshot").facts()
    assert Configuration("hf:m", "inforward").facts() != Configuration("hf:m", "decode").facts()


def test_a_codec_becomes_a_hook_and_none_leaves_the_job_alone() -> None:
    job = ScoreJob()
    assert Configuration("hf:m", "inforward").hooked(job, 64, 0) is job
    hook = Configuration("hf:m", "inforward", "fp8", layers=(1, 2)).hooked(job, 64, 0).hook
    assert (
        hook is not None and list(hook.config["layers"]) == [1, 2] and hook.config["length"] == 64
    )
    assert not Configuration("hf:m", "inforward", "fp8").lossless
    assert Configuration("hf:m", "inforward", "identity").lossless


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mode": "sideways"}, "sideways"),
        ({"codec": "hadamrd"}, "hadamrd"),
        ({"phases": (1, 9)}, "phase 9"),
        ({"windows": 1}, "windows"),
        ({"candidate": "gguf:x"}, "gguf:x"),
        ({"margin": 0.0}, "margin"),
        ({"sweep": ()}, "noise"),
    ],
)
def test_mistakes_in_a_plan_end_with_words(changed: dict, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        GapPlan(**{"reference": "hf:m", "candidate": "hf:m", "codec": "fp8"} | changed)


def test_attention_is_switched_alone_in_the_format_where_engines_meet() -> None:
    path = engine_steps("hf:m?dtype=float32", "vllm:m", ("float32", "bfloat16"))
    facts = {"vllm:m": {"device": "cuda:0", "attention_backend": "FLASH_ATTN"}}
    found = {
        s.name: (s.base, s.switched) for s in switches("hf:m?dtype=float32", "vllm:m", path, facts)
    }
    assert found == {
        "hf.attention": ("hf:m?dtype=bfloat16", "hf:m?dtype=bfloat16&attention=eager"),
        "vllm.attention": ("vllm:m", "vllm:m?attention_backend=TRITON_ATTN"),
    }
    llama_cpp = switches("hf:m", "gguf:m.gguf", [], {"gguf:m.gguf": {"device": "cuda"}})
    assert [s.name for s in llama_cpp] == ["hf.attention"]
    on_cpu = switches("hf:m", "vllm:m", [], {"vllm:m": {"device": "cpu"}})
    assert [s.name for s in on_cpu] == ["hf.attention"]
