"""Routing of mixtures of experts: against top-k by hand, and what forcing the reference's routing
removes.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from assay.cli.main import invoke
from assay.engines.hf.scorer import HfScorer
from assay.engines.scoring import ScoreJob, ScoringPath, Window
from assay.errors import AssayError
from assay.fidelity.metrics.token_statistics import window_statistics
from assay.fidelity.routing import (
    Routed,
    RoutingHook,
    _changed,
    _moved,
    check_engines,
    expert_layers,
    routed_rows,
)
from tiny_target import make_experts, make_target

pytestmark = pytest.mark.engine

DOCS = Path(__file__).parents[2] / "docs" / "compare.md"
KINDS = ("mixtral", "qwen3_moe")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models of both kinds, and of each one whose router alone and one whose experts alone are
    perturbed.
    """
    folder = tmp_path_factory.mktemp("experts")
    for kind in KINDS:
        make_experts(folder / kind, kind)
        for part, wanted in (("router", "gate.weight"), ("experts", "down_proj")):
            model = transformers.AutoModelForCausalLM.from_pretrained(folder / kind)
            torch.manual_seed(1)
            with torch.no_grad():
                for name, tensor in model.named_parameters():
                    if name.endswith(wanted):
                        tensor.add_(0.1 * torch.randn_like(tensor) * tensor.std())
            shutil.copytree(folder / kind, folder / f"{kind}-{part}")
            model.save_pretrained(folder / f"{kind}-{part}")
    make_experts(folder / "deep", "mixtral", layers=3)
    make_target(folder / "dense", hidden=32, layers=1)
    return folder


def windows(count: int = 5, length: int = 24) -> list[Window]:
    ids = np.random.default_rng(0).integers(0, 256, (count, length))
    return [Window(i, tuple(map(int, row))) for i, row in enumerate(ids)]


def compare(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    out: Path,
    *names: str,
    more: tuple[str, ...] = (),
) -> tuple[int, dict[str, Any]]:
    monkeypatch.setenv("ASSAY_CACHE", str(out / "cache"))
    specs = [name if ":" in name else f"hf:{folder / name}" for name in names]
    shape = (
        "--text",
        str(DOCS),
        "--windows",
        "12",
        "--length",
        "32",
        "--no-floors",
        "--json",
        str(out / "o.json"),
    )
    code = invoke(["compare", *specs, "--routing", *shape, *more])
    return code, json.loads((out / "o.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "job", [ScoreJob(batch=2), ScoreJob(ScoringPath.CHUNKED, scored_from=9, chunk=5)]
)
def test_what_is_read_is_top_k_of_the_routers_logits(
    models: Path, kind: str, job: ScoreJob
) -> None:
    """From the router's inputs, by hand and in float64."""
    engine = HfScorer.load(f"hf:{models / kind}?dtype=float32")
    model, given = engine.engine.model, windows()
    layers = expert_layers(model)
    assert [*layers] == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    read = {row.window.index: routed for row, routed in routed_rows(engine, given, job, layers)}
    inputs: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_pre_hook(
                lambda m, a, name=name: inputs.__setitem__(name, a[0].double())
            )
    normalised = kind == "mixtral"
    for window in given:
        with torch.inference_mode():
            model(torch.tensor([window.tokens[:-1]]))
        for layer, (name, states) in enumerate(inputs.items()):
            logits = (
                states.reshape(-1, 32).numpy()
                @ model.get_parameter(f"{name}.weight").detach().double().numpy().T
            )
            p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
            k = 2 if normalised else 3
            best = np.argsort(-p, axis=1)[:, :k]
            weight = np.take_along_axis(p, best, 1)
            weight /= weight.sum(1, keepdims=True) if normalised else 1
            np.testing.assert_array_equal(read[window.index]["index"][layer], best)
            np.testing.assert_allclose(read[window.index]["weight"][layer], weight, rtol=1e-4)
    engine.close()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "job", [ScoreJob(batch=2), ScoreJob(ScoringPath.DECODE, scored_from=20), ScoreJob(ScoringPath.CHUNKED, 9, 5)]  # noqa: E501
)  # fmt: skip
def test_forcing_its_own_routing_changes_nothing_and_another_does(
    models: Path, kind: str, job: ScoreJob
) -> None:
    engine = HfScorer.load(f"hf:{models / kind}?dtype=float32")
    layers, given = expert_layers(engine.engine.model), windows()
    free = list(routed_rows(engine, given, job, layers))
    forced = list(routed_rows(engine, given, job, layers, lambda n: free[n][1]))
    for (a, own), (b, again) in zip(free, forced, strict=True):
        assert torch.equal(a.states, b.states)  # type: ignore[union-attr]
        np.testing.assert_array_equal(own["index"], again["index"])
    turned = {
        n: {**routed, "index": (routed["index"] + 1) % 4} for n, (_, routed) in enumerate(free)
    }
    for (a, _), (b, own) in zip(
        free, routed_rows(engine, given, job, layers, turned.__getitem__), strict=True
    ):
        assert window_statistics(a, b).kl.mean() > 0.01
        np.testing.assert_array_equal(
            own["index"], free[b.window.index][1]["index"]
        )  # what it chose itself
    engine.close()


FAMILIES: dict[str, dict[str, Any]] = {
    "DeepseekV3Config": {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_shared_experts": 1,
    },
    "GptOssConfig": {"num_local_experts": 4, "layer_types": ["full_attention"] * 2},
    "OlmoeConfig": {"num_experts": 8},
    "Glm4MoeConfig": {"n_routed_experts": 8, "first_k_dense_replace": 1, "n_shared_experts": 1},
}


@pytest.mark.parametrize("name", [*FAMILIES, "Llama4TextConfig"])
def test_other_families_are_read_and_forced_or_refused(name: str) -> None:
    more = FAMILIES.get(name, {"num_local_experts": 4, "intermediate_size_mlp": 32})
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "max_position_embeddings": 256,
        "head_dim": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "eos_token_id": 1,
    }
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        getattr(transformers, name)(**shape | more)
    ).eval()
    if name not in FAMILIES:
        with pytest.raises(
            AssayError, match="has 4 experts, but routes in a way that cannot be read"
        ):
            expert_layers(model)
        return
    for tensor in model.parameters():
        torch.nn.init.normal_(tensor, std=0.2)
    layers, ids = expert_layers(model), torch.randint(0, 300, (3, 11))

    def states(given: Any = None) -> tuple[torch.Tensor, list[Routed]]:
        hook = RoutingHook(layers, given)
        with torch.inference_mode(), hook.attach(model):
            for index in range(hook.passes):
                hook.new_cache(3, index)
                found = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
        return found, [hook.take() for _ in range(3)]

    free, routed = states()
    assert routed[0]["index"].shape == (len(layers), 11, 2)
    assert torch.equal(states(routed.__getitem__)[0], free)
    turned = [{**r, "index": (r["index"] + 1) % 4} for r in routed]
    assert (states(turned.__getitem__)[0] - free).abs().max() > 0.01


def test_a_batch_that_does_not_fit_forces_the_right_windows(
    models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = HfScorer.load(f"hf:{models / 'mixtral'}?dtype=float32")
    layers, given = expert_layers(engine.engine.model), windows(7)
    free = list(routed_rows(engine, given, ScoreJob(batch=1), layers))
    forward, calls = engine.engine.model.base_model.forward, []

    def small(*arguments: Any, input_ids: torch.Tensor, **more: Any) -> Any:
        calls.append(len(input_ids))
        if len(input_ids) > 2:
            raise RuntimeError("out of memory")
        return forward(*arguments, input_ids=input_ids, **more)

    monkeypatch.setattr(engine.engine.model.base_model, "forward", small)
    forced = list(routed_rows(engine, given, ScoreJob(batch=5), layers, lambda n: free[n][1]))
    assert calls[0] == 5 and set(calls[1:]) == {1, 2}
    for (a, own), (b, again) in zip(free, forced, strict=True):
        assert a.window == b.window
        torch.testing.assert_close(a.states, b.states)  # type: ignore[union-attr]
        np.testing.assert_array_equal(own["index"], again["index"])
    engine.close()


def test_shares_are_those_of_sets_and_of_weights() -> None:
    a = np.array([[[0, 1], [2, 3], [0, 3]]])
    b = np.array([[[1, 0], [2, 1], [1, 2]]])
    assert _changed(a, b).tolist() == [[False, True, True]]
    weights = (
        np.array([[0.5, 0.5], [0.75, 0.25], [0.5, 0.5]]),
        np.array([[0.5, 0.5], [1.5, 0.5], [0.1, 0.1]]),
    )
    assert _moved((a[0], weights[0]), (b[0], weights[1]), 4).tolist() == pytest.approx([0, 0.25, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_a_perturbed_router_is_all_of_its_kl_and_perturbed_experts_are_not(
    models: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [kind, f"{kind}-router", f"{kind}-experts", f"{kind}?dtype=bfloat16"]
    _, body = compare(monkeypatch, models, tmp_path, *names)
    router, experts, rounded = (c["routing"] for c in body["results"]["candidates"])
    assert router["kld_free"]["value"] == pytest.approx(
        body["results"]["candidates"][0]["kld"]["mean"]
    )
    assert router["kld_free"]["value"] > 1e-4 and router["kld_forced"]["value"] < 1e-9
    assert router["share_of_kld_pct"]["value"] == pytest.approx(100, abs=0.01)
    assert experts["kld_forced"]["value"] > 0.1 * experts["kld_free"]["value"] > 1e-6
    assert rounded["kld_forced"]["value"] > 0
    for found in (router, experts, rounded):
        each = [one["changed_pct"]["value"] for one in found["layers"]]
        assert found["changed_pct"]["value"] == pytest.approx(np.mean(each))
        assert max(each) <= found["changed_anywhere_pct"]["value"] <= sum(each) + 1e-9
        assert (
            found["changed_pct"]["lo"]
            <= found["changed_pct"]["value"]
            <= found["changed_pct"]["hi"]
        )
        assert 0 < found["weight_moved_pct"]["value"] < 100
    assert (
        experts["layers"][0]["changed_pct"]["value"] == 0
    )  # nothing before the first router has changed
    assert router["layers"][0]["changed_pct"]["value"] > 0
    titles = [f["title"] for f in body["findings"] if f["id"] == "fidelity.routing"]
    assert len(titles) == 3 and "with the reference's routing KL is" in titles[0]


def test_the_model_itself_keeps_every_expert(
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, body = compare(monkeypatch, models, tmp_path, "mixtral", "mixtral")
    routing = body["results"]["routing"]
    assert code == 0 and routing["available"]
    assert routing["kld_forced"]["value"] == routing["changed_anywhere_pct"]["value"] == 0
    assert routing["share_of_kld_pct"] is None
    specs = ["hf:./mixtral", "hf:./mixtral-router"]
    monkeypatch.chdir(models)
    monkeypatch.setenv("COLUMNS", "100")
    capsys.readouterr()
    invoke(
        [
            "compare",
            *specs,
            "--routing",
            "--text",
            str(DOCS),
            "--windows",
            "8",
            "--length",
            "32",
            "--no-floors",
        ]
    )
    out = capsys.readouterr().out
    assert "of tokens change experts" in out and "with the reference's routing" in out
    assert len(out.splitlines()) <= 40, out


def test_what_has_no_experts_or_cannot_be_read_is_one_line(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, body = compare(monkeypatch, models, tmp_path, "dense", "dense?dtype=bfloat16")
    assert body["results"]["routing"] == {"available": False, "reason": "no experts", "layers": []}
    assert "hf:dense?dtype=bfloat16: no experts" in [f["title"] for f in body["findings"]]
    code, body = compare(monkeypatch, models, tmp_path, "mixtral", "deep")
    (finding,) = body["findings"]
    assert code == 2 and finding["id"] == "fidelity.routing_mismatch"
    assert "3 layers of 4 experts, the reference 2 layers of 4 experts" in finding["title"]
    for spec in (f"vllm:{models / 'mixtral'}", "http://localhost:9"):
        code, body = compare(monkeypatch, models, tmp_path, "mixtral", spec)
        assert code == 2 and "--routing reads and replaces" in body["findings"][0]["title"]
    with pytest.raises(AssayError, match="which --ray opens elsewhere"):
        check_engines(["hf:a"], "auto")
    monkeypatch.setattr("assay.fidelity.routing._CHOSEN", set())
    code, body = compare(monkeypatch, models, tmp_path, "mixtral", "mixtral-router")
    assert (
        code == 2
        and "MixtralForCausalLM has 4 experts, but routes in a way" in body["findings"][0]["title"]
    )


def test_an_early_end_measures_the_windows_that_were_scored(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = compare(monkeypatch, models, tmp_path, "mixtral", "mixtral-router")[1]["results"][
        "routing"
    ]
    from assay.fidelity import candidate
    from assay.fidelity import compare as compared

    monkeypatch.setattr(candidate, "FIRST_ANALYSIS", 4)
    monkeypatch.setattr(candidate, "is_certain", lambda *a: True)
    planned = compared.run_compare
    monkeypatch.setattr(
        compared,
        "run_compare",
        lambda plan, *a, **more: planned(replace(plan, all=False), *a, **more),
    )
    _, body = compare(monkeypatch, models, tmp_path, "mixtral", "mixtral-router")
    assert (
        body["results"]["windows"] == 4 and body["results"]["routing"]["kld_forced"]["value"] < 1e-9
    )
    assert body["results"]["routing"]["changed_pct"]["value"] != whole["changed_pct"]["value"]
