"""What documents may say, and that nonsense in them is a finding: never a traceback, never a stage
skipped in silence.
"""

from __future__ import annotations

import json
import math
import random
import zlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from assay.checkpoint import lists as verification
from assay.checkpoint.document_types import clean
from assay.checkpoint.documents import CONFIG, GENERATION, TABLES, TOKENIZER, TOKENIZER_CONFIG
from checkpoint import fuzzing
from checkpoint.asking import Ask, finding
from checkpoint_samples import config, edit_json


def wrong(document: dict[str, Any], table: Any = CONFIG) -> list[str]:
    return [entry.path for entry in clean(document, table)[1]]


def test_a_sound_config_is_left_as_it_is() -> None:
    settings = config(
        rope_scaling=None, eos_token_id=[1, 2], something_else={"a": [1, "b"]}, head_dim=None
    )
    assert clean(settings, CONFIG) == (settings, [])


@pytest.mark.parametrize(
    ("changes", "paths"),
    [
        ({"num_hidden_layers": "4"}, ["num_hidden_layers"]), ({"num_hidden_layers": -1}, ["num_hidden_layers"]),  # noqa: E501
        ({"num_hidden_layers": 4.0}, ["num_hidden_layers"]), ({"num_hidden_layers": True}, ["num_hidden_layers"]),  # noqa: E501
        ({"hidden_size": 10**9}, ["hidden_size"]), ({"rope_theta": math.nan}, ["rope_theta"]),
        ({"quantization_config": "fp8"}, ["quantization_config"]), ({"architectures": "Llama"}, ["architectures"]),  # noqa: E501
        ({"text_config": {"vocab_size": []}}, ["text_config.vocab_size"]), ({"text_config": 3}, ["text_config"]),  # noqa: E501
        ({"rope_scaling": {"factor": "x", "type": 3}}, ["rope_scaling.factor", "rope_scaling.type"]),  # noqa: E501
        ({"rope_parameters": {"full_attention": {"factor": []}}}, ["rope_parameters.full_attention.factor"]),  # noqa: E501
        ({"quantization_config": {"config_groups": {"a": None, "b": {"targets": 5}}}},
         ["quantization_config.config_groups.a", "quantization_config.config_groups.b.targets"]),
        ({"unknown": {"deep": [1, {"x": math.nan}]}}, ["unknown.deep.1.x"]), ({"unknown": 10**39}, ["unknown"]),  # noqa: E501
        ({"time_step_limit": [0.0, math.inf]}, []), ({"intermediate_size": [128, 256]}, []),
        ({"num_key_value_heads": None}, []), ({"mlp_only_layers": []}, []),
    ],
)  # fmt: skip
def test_nonsense_is_named_by_its_path(changes: dict[str, Any], paths: list[str]) -> None:
    assert wrong(config(**changes)) == paths
    kept = clean(config(**changes), CONFIG)[0]
    assert [
        path for path in wrong(kept) if not path.startswith("unknown")
    ] == []  # what is left can be read


@pytest.mark.parametrize(
    ("table", "document", "paths"),
    [
        (GENERATION, {"temperature": 0.6, "top_k": 20, "eos_token_id": [1, 2], "do_sample": True}, []),  # noqa: E501
        (GENERATION, {"top_p": 1.5, "temperature": -1, "max_length": 0}, ["top_p", "temperature", "max_length"]),  # noqa: E501
        (TOKENIZER_CONFIG, {"model_max_length": 10**30, "bos_token": None, "eos_token": {"content": "x"}}, []),  # noqa: E501
        (TOKENIZER_CONFIG, {"eos_token": {"text": "x"}, "model_max_length": math.inf}, ["eos_token", "model_max_length"]),  # noqa: E501
        (TOKENIZER_CONFIG, {"added_tokens_decoder": {"²": 1}}, ["added_tokens_decoder.²"]),
        (TOKENIZER, {"model": {"vocab": {"a": 0}, "merges": ["a b"]}, "added_tokens": [{"id": 1, "content": "c"}]}, []),  # noqa: E501
        (TOKENIZER, {"model": {"vocab": [["a", 0.0], ["b", -1]]}}, []),
        (TOKENIZER, {"model": {"vocab": {"a": "0"}}, "added_tokens": -1}, ["model.vocab", "added_tokens"]),  # noqa: E501
        (TOKENIZER, {"added_tokens": [{"id": True, "content": {}}, 3]},
         ["added_tokens.0.id", "added_tokens.0.content", "added_tokens.1"]),
    ],
)  # fmt: skip
def test_the_other_documents(table: Any, document: dict[str, Any], paths: list[str]) -> None:
    assert wrong(document, table) == paths


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.skipif(not find_spec("transformers"), reason="needs the hf extra")
def test_no_default_config_of_transformers_is_nonsense() -> None:
    """Of hundreds of model types: those that differ are no language models, or count their layers
    by part.
    """
    from transformers import CONFIG_MAPPING

    odd, looked_at = set(), 0
    for kind in list(CONFIG_MAPPING.keys()):
        try:
            document = json.loads(CONFIG_MAPPING[kind]().to_json_string(use_diff=False))
        except Exception:
            continue  # some cannot be made without arguments
        looked_at += 1
        if wrong(document):
            odd.add(kind)
    assert looked_at > 300
    assert odd <= {"musicflamingo", "lxmert", "efficientloftr"}


# Through verify: a finding each, and no stage is left out in silence.


@pytest.mark.parametrize(
    ("name", "changes", "found"),
    [
        ("config.json", {"num_hidden_layers": "4"}, "config_conflict"), ("config.json", {"vocab_size": -1}, "config_conflict"),  # noqa: E501
        ("config.json", {"quantization_config": "fp8"}, "quantization_conflict"),
        ("config.json", {"quantization_config": {}}, "quantization_conflict"),
        ("config.json", {"rope_theta": math.nan}, "config_conflict"), ("config.json", {"head_dim": 0}, "config_conflict"),  # noqa: E501
        ("generation_config.json", {"eos_token_id": "2"}, "config_conflict"),
        ("tokenizer.json", {"added_tokens": -1}, "tokenizer_conflict"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"²": {"content": "x"}}}, "tokenizer_conflict"),  # noqa: E501
        ("model.safetensors.index.json", {"metadata": {"total_size": math.nan}}, "index_mismatch"),
    ],
)  # fmt: skip
def test_nonsense_fails(
    ask: Ask, model: Path, name: str, changes: dict[str, Any], found: str
) -> None:
    edit_json(model / name, **changes)
    code, report = ask(model, "--allow-unverified", "--hash", "none")
    assert code == 1
    said = finding(report, found)
    assert name in said["title"] or next(iter(changes)) in said["title"]


def test_what_engines_do_not_need_is_a_warning(ask: Ask, model: Path) -> None:
    edit_json(model / "config.json", initializer_range="x", pad_token_id=-1)
    code, report = ask(model, "--allow-unverified", "--hash", "none")
    said = [f for f in report["findings"] if f["id"] == "checkpoint.config_conflict"]
    assert (code, [f["severity"] for f in said]) == (0, ["warning", "warning"])


@pytest.mark.parametrize(
    "key",
    ["hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "vocab_size"],
)
def test_a_dimension_that_is_not_given_leaves_the_shapes_unexamined(
    ask: Ask, model: Path, key: str
) -> None:
    edit_json(model / "config.json", **{key: ...})
    code, report = ask(model, "--allow-unverified", "--hash", "none")
    assert (code, key in finding(report, "not_examined")["title"]) == (0, True)
    (model / "list.json").write_text("")
    assert (
        ask(model, "--write-manifest", model.parent / "list.json")[0] == 3
    )  # not examined is not passed


def test_a_million_values_of_nonsense_are_some_findings(ask: Ask, model: Path) -> None:
    nonsense = {str(i): i for i in range(100_000)}
    edit_json(
        model / "config.json",
        quantization_config={"quant_method": "gptq", "bits": 4, "dynamic": nonsense},
    )
    code, report = ask(model, "--allow-unverified", "--hash", "none")
    assert code == 1
    assert len(report["findings"]) < 40
    assert any("99980 more values" in f["title"] for f in report["findings"])


# Every value of every document of forty kinds of checkpoints, changed to what it cannot be.


def fuzz(kind: str, share: float, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        verification, "find_spec", lambda name: None
    )  # transformers' own model is built elsewhere
    subject, chosen = fuzzing.subject(kind, folder / "m"), random.Random(zlib.crc32(kind.encode()))
    usual = fuzzing.said(subject.examine(monkeypatch)[0])
    for name, at in subject.changes():
        for value in fuzzing.VALUES:
            if chosen.random() >= share:
                continue
            report, seconds = subject.examine(
                monkeypatch, name, fuzzing.changed(subject.documents[name], at, value)
            )
            fuzzing.shown(report)
            where = (kind, name, at, value)
            assert seconds < fuzzing.MOST_S, where
            if (
                value is not fuzzing.GONE
                and clean(fuzzing.changed(subject.documents[name], at, value), TABLES[name])[1]
            ):
                assert fuzzing.said(report) - usual, where


@pytest.mark.parametrize("kind", fuzzing.KINDS)
def test_no_value_of_a_document_stops_verify(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fuzz(kind, 0.012, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("kind", fuzzing.KINDS)
def test_no_value_of_any_document_stops_verify(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fuzz(kind, 1.0, tmp_path, monkeypatch)


HOSTILE = [10**9, 10**39, -1, 0, 1e308, math.nan, "x", [], {}, True, None]


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
def test_counts_are_bounded_with_transformers_too(
    model: Path, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The families that only transformers knows: nothing is enumerated that the config does not
    bound.
    """
    from assay.checkpoint.meta_model import compare_with_transformers
    from assay.checkpoint.opening import open_checkpoint

    monkeypatch.setattr("assay.checkpoint.meta_model._run", lambda text: pytest.fail("it ran"))
    for key in ("num_experts", "num_hidden_layers", "num_nextn_predict_layers", "depth"):
        edit_json(
            model / "config.json",
            model_type="granite",
            **{key: value, "vision_config": {"num_layers": 10**5}},
        )
        compared = compare_with_transformers(open_checkpoint(str(model)).checkpoint)
        assert "more layers or experts" in compared.problem
