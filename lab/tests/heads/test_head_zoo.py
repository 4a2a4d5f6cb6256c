"""A dead head told from one that disagrees: by counts, by start-up lines and by the file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from assay.speculation.head_file import examine_head
from assay.speculation.options import SpecOptions
from assay.speculation.spec import examine
from heads_serve import acceptance, add_scales, damaged, pack_int4

PAGE = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{{engine="0"}} {steps}.0
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {drafted}.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {accepted}.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
"""


def page(folder: Path, steps: int, counts: list[int]) -> str:
    text = PAGE.format(steps=steps, drafted=steps * len(counts), accepted=sum(counts))
    for j, n in enumerate(counts):
        text += (
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{engine="0",position="{j}"}}'
            f" {n}.0\n"
        )
    (folder / "metrics.txt").write_text(text)
    return str(folder / "metrics.txt")


def causes(source: str, head: Path) -> list[str]:
    report = examine([source], SpecOptions(model=str(head)))
    return list(next(f for f in report.findings if f.id == "speculation.head_dead").causes)


def test_counts_of_a_dead_head_name_what_its_file_shows(trained: Any, tmp_path: Path) -> None:
    source = page(tmp_path, 2000, [0, 0, 0, 0])
    zeros = causes(source, damaged(trained[0], "zeros", tmp_path / "zeros"))
    assert zeros[0].startswith("the checkpoint:") and "all zero" in zeros[0]
    lost = causes(source, damaged(trained[0], "missing-layer", tmp_path / "lost"))
    assert "has no layers.0.hidden_norm and 9 more" in lost[0]
    # A file that is whole does not accuse itself.
    whole = causes(source, trained[0])
    assert not whole[0].startswith("the checkpoint:")


def test_norms_near_zero_are_those_of_another_convention(trained: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for mean, said in ((0.03, True), (1.03, False)):  # as SmolLM2's head has them: 1.03 ± 0.06
        folder = tmp_path / str(mean)
        shutil.copytree(trained[0], folder, ignore=shutil.ignore_patterns("text"))
        tensors = load_file(folder / "model.safetensors")
        noise = torch.Generator().manual_seed(1)
        for name in (n for n in tensors if "norm" in n):
            tensors[name] = (
                mean + 0.06 * torch.randn(tensors[name].shape, generator=noise)
            ).bfloat16()
        save_file(tensors, folder / "model.safetensors")
        found = [f.title for f in examine_head(str(folder)).findings]
        assert any("stored as w - 1" in title for title in found) is said, found


def test_a_diverged_head_is_not_called_dead(trained: Any, tmp_path: Path) -> None:
    report = examine([page(tmp_path, 2000, [420, 150, 60, 20])], SpecOptions(model=str(trained[0])))
    assert [f.id for f in report.findings if f.id.startswith("speculation.head_d")] == [
        "speculation.head_diverged"
    ]


def test_served_steps_are_counted_by_prompt() -> None:
    """What a text grew by at each step; the last step, which the end may cut, is left out."""
    asked = [("chat", [1]), ("code", [1]), ("code", [1])]
    row = acceptance(asked, [(11, [3, 1, 5, 1]), (4, [2, 1]), (1, [])])
    assert (row["steps"], row["prompts"], row["counts"]) == (4, 2, [3, 2, 1, 1])
    assert row["tokens_per_step"]["value"] == pytest.approx(11 / 4)
    assert row["kinds"]["chat"]["positions"][0]["value"] == pytest.approx(2 / 3)
    assert acceptance(asked[:1], [(1, [])]) == {}


def test_damaged_heads_are_what_their_names_say(trained: Any, target: Path, tmp_path: Path) -> None:
    from assay_lab.heads.export import read_head

    whole = read_head(trained[0])
    rounded = read_head(damaged(trained[0], "int4", tmp_path / "int4"))
    for a, b in (
        (whole.fc.weight, rounded.fc.weight),
        (whole.lm_head.weight, rounded.lm_head.weight),
    ):
        assert 0 < (a - b).norm() / a.norm() < 0.2
    assert torch.equal(whole.norm.weight, rounded.norm.weight)
    wrong = read_head(damaged(trained[0], "wrong-norm", tmp_path / "norm"))
    assert torch.allclose(wrong.norm.weight, whole.norm.weight + 1, atol=0.02)
    swapped = damaged(trained[0], "embedding-swapped", tmp_path / "swapped", target)
    from safetensors.torch import load_file

    own = load_file(swapped / "model.safetensors")["embed_tokens.weight"]
    theirs = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    assert not torch.equal(own, theirs) and torch.equal(own.sort(0).values, theirs.sort(0).values)


def test_scales_are_written_as_engines_read_them(target: Path, tmp_path: Path) -> None:
    import json

    from safetensors.torch import load_file

    folder = shutil.copytree(target, tmp_path / "target")
    add_scales(folder, [(8.0, 4.0), (2.0, 1.0)])
    found = load_file(folder / "scales.safetensors")
    assert sorted(found) == [f"model.layers.{i}.self_attn.{n}_scale" for i in (0, 1) for n in "kv"]
    assert float(found["model.layers.1.self_attn.k_scale"]) == pytest.approx(2 / 448)
    assert (
        json.loads((folder / "config.json").read_text())["quantization_config"]["kv_cache_scheme"][
            "num_bits"
        ]
        == 8
    )


def test_packed_int4_is_the_grid_that_is_simulated_and_passes_verify(
    target: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    from assay.checkpoint.options import VerifyOptions
    from assay.checkpoint.verify import verify
    from assay_lab.quantisation.integers import quantise_dequantise

    folder = shutil.copytree(target, tmp_path / "target")
    before = load_file(folder / "model.safetensors")
    pack_int4(folder, 32)
    found = load_file(folder / "model.safetensors")
    stem = "model.layers.1.mlp.down_proj"
    words, scale = found[f"{stem}.weight_packed"], found[f"{stem}.weight_scale"]
    codes = (
        torch.stack([(words >> s) & 15 for s in range(0, 32, 4)], -1)
        .reshape(len(words), -1)
        .float()
        - 8
    )
    value = codes * scale.float().repeat_interleave(32, 1)
    wanted = quantise_dequantise(before[f"{stem}.weight"].float(), 4, 32, symmetric=True)
    assert found[f"{stem}.weight_shape"].tolist() == list(value.shape)
    assert torch.allclose(value, wanted, atol=float(scale.float().max()) / 50)
    report = verify(str(folder), VerifyOptions(allow_unverified=True))
    assert not [f for f in report.findings if f.severity == "error"], report.findings
