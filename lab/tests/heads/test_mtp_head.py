"""An MTP layer: against vLLM's written out in numpy and against vLLM itself; its checkpoint, and
what is refused.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file
from test_head_model import norm, rotate

from assay.checkpoint.options import VerifyOptions
from assay.checkpoint.verify import verify
from assay.cli.main import invoke
from assay.engines.vllm.path import packages_alone
from assay.errors import AssayError, UsageError
from assay.speculation.head_file import examine_head
from assay_lab.heads.drafting import draft, padded
from assay_lab.heads.experiment import run_try
from assay_lab.heads.export import MTP_FILE, read_head, write_head
from assay_lab.heads.model import HeadConfig, MtpHead, SharedLoss
from assay_lab.heads.observed import observe
from assay_lab.heads.pack import run_pack
from assay_lab.options import HeadPackPlan, HeadTryPlan
from tiny_target import make_target

pytestmark = pytest.mark.engine


class Engine:
    """vLLM's MiMoMTP in numpy, one token at a time with a cache, from the tensors of the file."""

    def __init__(self, folder: Path) -> None:
        held = load_file(folder / MTP_FILE) | load_file(folder / "model.safetensors")
        self.t = {
            n.removeprefix("model.mtp_layers.0."): x.double().numpy() for n, x in held.items()
        }
        self.c, self.cache = json.loads((folder / "config.json").read_text()), {}

    def linear(self, name: str, x: Any) -> Any:
        return self.t[f"{name}.weight"] @ x + self.t.get(f"{name}.bias", 0)

    def one(self, token: int, hidden: Any, position: int) -> tuple[int, Any]:
        """(drafted token, the state that the next step reads)."""
        t, eps, d = (
            self.t,
            self.c["rms_norm_eps"],
            self.c["hidden_size"] // self.c["num_attention_heads"],
        )
        theta = self.c["rope_parameters"]["rope_theta"]
        embedded = t["model.embed_tokens.weight"][token] * (position != 0)
        both = [
            norm(hidden, t["hidden_layernorm.weight"], eps),
            norm(embedded, t["token_layernorm.weight"], eps),
        ]
        residual = self.linear("input_proj", np.concatenate(both))
        x = norm(residual, t["input_layernorm.weight"], eps)
        q, k, v = (self.linear(f"self_attn.{n}_proj", x).reshape(-1, d) for n in "qkv")
        self.cache[position] = (rotate(k, position, theta), v)
        q, heads = rotate(q, position, theta), []
        for h in range(len(q)):
            g = h // (len(q) // len(k))
            scores = np.array([self.cache[i][0][g] @ q[h] for i in range(position + 1)]) / np.sqrt(
                d
            )
            weights = np.exp(scores - scores.max())
            heads.append(
                weights
                @ np.array([self.cache[i][1][g] for i in range(position + 1)])
                / weights.sum()
            )
        residual = residual + self.linear("self_attn.o_proj", np.concatenate(heads))
        y = norm(residual, t["post_attention_layernorm.weight"], eps)
        gate = self.linear("mlp.gate_proj", y)
        residual = residual + self.linear(
            "mlp.down_proj", gate / (1 + np.exp(-gate)) * self.linear("mlp.up_proj", y)
        )
        state = norm(residual, t["final_layernorm.weight"], eps)
        return int((t["lm_head.weight"] @ state).argmax()), state


@pytest.fixture(scope="module")
def noisy(trained_mtp: Any, qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained head with noise on every tensor: it drafts all kinds of tokens, and some are
    right.
    """
    folder, head = tmp_path_factory.mktemp("noisy"), read_head(trained_mtp[0], qwen)
    torch.manual_seed(1)
    with torch.no_grad():
        for p in head.parameters():
            p.add_(0.1 * torch.randn_like(p))
    write_head(folder, head, {"target": {}}, torch.float32, qwen)
    return folder


@pytest.fixture(scope="module")
def model(qwen: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(qwen).eval()


def test_drafts_are_those_of_an_engine_with_a_cache(noisy: Path, qwen: Path, model: Any) -> None:
    head, depth = read_head(noisy, qwen), 3
    ids = [int(i) for i in np.random.default_rng(5).integers(0, 250, 24)]
    states: list[Any] = []
    hook = model.model.layers[-1].register_forward_hook(lambda m, a, out: states.append(out))
    seen = observe(model, *padded([ids], "cpu"), head.config.aux_layers)
    hook.remove()
    ours = draft(head, model, seen, depth)[0].tolist()
    last = (
        (states[0][0] if isinstance(states[0], tuple) else states[0])
        .double()
        .numpy()
        .reshape(len(ids), -1)
    )
    for p in (0, 5, 11, 20):
        engine = Engine(noisy)
        for i in range(p + 1):
            token, hidden = engine.one(ids[i + 1], last[i], i)
        theirs = [token]
        for j in range(1, depth):
            token, hidden = engine.one(token, hidden, p + j)
            theirs.append(token)
        assert ours[p] == theirs
    assert len({tuple(row) for row in ours}) > 12


def test_the_shared_loss_has_the_gradient_of_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("assay_lab.heads.model.ROWS", 3)
    torch.manual_seed(0)
    x, last, output = (torch.randn(n, 6, dtype=torch.float64).float() for n in (8, 8, 11))
    a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss, right = SharedLoss.apply(a, last, output)
    plain = -((last @ output.T).softmax(-1) * (b @ output.T).log_softmax(-1)).sum(-1).mean()
    (2 * loss).backward()
    (2 * plain).backward()
    assert float(loss.detach()) == pytest.approx(float(plain.detach()), rel=1e-5)
    assert torch.allclose(a.grad, b.grad, atol=1e-6)
    assert int(right) == int(((x @ output.T).argmax(-1) == (last @ output.T).argmax(-1)).sum())


def test_it_learns_and_its_folder_is_the_target_with_a_layer(
    trained_mtp: Any, qwen: Path, model: Any
) -> None:
    folder, report = trained_mtp
    curve = report.results["loss_curve"]
    assert curve[-1]["loss"][0] < 0.6 * curve[0]["loss"][0] and report.verdict == "pass"
    assert report.results["acceptance"]["all"]["positions"][0]["value"] > 0.5
    assert report.results["bytes"] == (folder / MTP_FILE).stat().st_size < 200_000
    assert (folder / "model.safetensors").samefile(qwen / "model.safetensors")
    again = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        assert torch.equal(again(torch.arange(9)[None]).logits, model(torch.arange(9)[None]).logits)


def test_verify_accepts_the_checkpoint_and_says_what_it_lacks(
    trained_mtp: Any, tmp_path: Path
) -> None:
    def errors(folder: Path) -> list[str]:
        report = verify(str(folder), VerifyOptions(values=True, allow_unverified=True))
        assert report.results["mtp"]["family"] == "mimo" and report.results["mtp"]["expected"] == 16
        return [f.id for f in report.findings if f.severity == "error"]

    assert errors(trained_mtp[0]) == []
    copy = tmp_path / "lost"
    shutil.copytree(trained_mtp[0], copy, ignore=shutil.ignore_patterns("text"))
    tensors = load_file(copy / MTP_FILE)
    tensors.pop("model.mtp_layers.0.self_attn.q_proj.bias")
    save_file(tensors, copy / MTP_FILE)
    assert "checkpoint.mtp_partial" in errors(copy)
    with pytest.raises(AssayError, match=r"has no midlayer.self_attn.q_proj.bias"):
        read_head(copy)


def test_spec_reads_the_values_of_the_layer(trained_mtp: Any, qwen: Path, tmp_path: Path) -> None:
    def titles(change: Any) -> list[str]:
        head = read_head(trained_mtp[0], qwen)
        with torch.no_grad():
            for name, p in head.named_parameters():
                change(name, p)
        write_head(tmp_path, head, {}, target=qwen)
        return [f.title for f in examine_head(str(tmp_path)).findings]

    assert any("all zero" in t for t in titles(lambda name, p: p.zero_()))
    assert any(
        "stored as w - 1" in t for t in titles(lambda name, p: p.sub_(1) if "norm" in name else p)
    )
    assert [t[:37] for t in titles(lambda name, p: p)] == ["the checkpoint holds a complete head "]


def test_the_experiment_takes_it(trained_mtp: Any, qwen: Path, tmp_path: Path) -> None:
    report = run_try(
        HeadTryPlan.of(
            {
                "model": str(qwen),
                "head": trained_mtp[0],
                "out": tmp_path / "rows.json",
                "targets": ["bf16", "int4-g32", "bf16+kv-fp8"],
                "prompts": 200,
                "texts": 13,
                "tokens": 40,
                "depth": 3,
                "temperatures": "0",
                "batch_tokens": 1024,
            }
        )
    )
    first = {key: row["positions"][0]["value"] for key, row in report.results["rows"].items()}
    assert (
        first["bf16|bf16|0"] > 0.5
        and first["bf16|int8|0"] > 0.5
        and first["bf16+kv-fp8|bf16|0"] > 0.5
    )
    assert max(first[f"bf16|{s}|0"] for s in ("missing", "zeros", "embedding-swapped")) < 0.2, first


def test_a_model_beside_which_none_is_served_is_refused(
    target: Path, qwen: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        invoke(["heads", "train", str(target), "--kind", "mtp", "--out", str(tmp_path / "a")]) == 2
    )
    assert "No MTP head can be served beside llama" in " ".join(capsys.readouterr().out.split())
    qwen_model = transformers.AutoModelForCausalLM.from_pretrained(qwen)
    with pytest.raises(UsageError, match="width of its target's MLP, 128"):
        HeadConfig.of_target(qwen_model, 0, 96, "mtp")
    qwen_model.config.rope_parameters = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10_000.0}
    with pytest.raises(UsageError, match="scaled rotary positions"):
        HeadConfig.of_target(qwen_model, 0, 0, "mtp")
    assert not (tmp_path / "a" / "text").exists()


def test_the_targets_own_folder_is_refused(qwen: Path) -> None:
    before = {p.name: p.read_bytes() for p in qwen.iterdir() if p.is_file()}
    for kind in ("mtp", "eagle3"):
        assert invoke(["heads", "train", str(qwen), "--kind", kind, "--out", str(qwen)]) == 2
    assert {p.name: p.read_bytes() for p in qwen.iterdir() if p.is_file()} == before


def test_a_pack_holds_the_layer_and_not_its_target(
    trained_mtp: Any, qwen: Path, tmp_path: Path
) -> None:
    report = run_pack(
        HeadPackPlan.of(
            {"model": str(qwen), "head": trained_mtp[0], "out": tmp_path / "head.tar.xz"}
        )
    )
    shutil.unpack_archive(tmp_path / "head.tar.xz", tmp_path)
    names = {"SHA256SUMS", "config.json", MTP_FILE, "training.json"}
    assert {p.name for p in (tmp_path / qwen.name).iterdir()} == names and report.verdict == "pass"
    read_head(tmp_path / qwen.name, qwen)


def test_the_head_of_another_target_is_refused(trained_mtp: Any, tmp_path: Path) -> None:
    with pytest.raises(AssayError, match="num_hidden_layers 4, and deep has 5"):
        read_head(trained_mtp[0], make_target(tmp_path / "deep", kind="Qwen2", layers=5))


@pytest.mark.engine
def test_vllm_drafts_the_same(tmp_path: Path) -> None:
    from assay.demo import vllm_python

    target = make_target(
        tmp_path / "target", kind="Qwen2", hidden=128, layers=4
    )  # vLLM's attention asks for heads of 32
    model = transformers.AutoModelForCausalLM.from_pretrained(target)
    head = MtpHead(HeadConfig.of_target(model, 0, 0, "mtp"))
    torch.manual_seed(4)
    head.start(model, torch.ones(1))
    with torch.no_grad():
        for p in head.parameters():
            p.add_(0.1 * torch.randn_like(p))
    write_head(tmp_path / "head", head, {"target": {}}, torch.float32, target)
    generator, given = np.random.default_rng(2), ["asked.json", "found.json"]
    asked = [generator.integers(0, 250, n).tolist() for n in (7, 12, 20)]
    (tmp_path / given[0]).write_text(json.dumps(asked))
    script = Path(__file__).parents[2] / "benchmarks" / "heads" / "heads_mtp_equal.py"
    given = [
        str(target),
        str(tmp_path / "head"),
        str(tmp_path / given[1]),
        "--prompts",
        str(tmp_path / given[0]),
    ]
    env = {
        **os.environ,
        "OMP_WAIT_POLICY": "PASSIVE",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(packages_alone(tmp_path / "path")),
    }
    done = subprocess.run(
        [
            str(vllm_python()),
            str(script),
            *given,
            "--dtype",
            "float32",
            "--tokens",
            "40",
            "--depth",
            "3",
        ],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["equal"] == found["steps"] >= 60
    walked, theirs = found["walk"], found["counters"]
    assert walked["steps"] <= theirs["num_drafts"] <= walked["steps"] + 3 * len(asked)
    for mine, own in zip(walked["accepted"], theirs["num_accepted_tokens_per_pos"], strict=True):
        assert mine <= own <= mine + 3 * len(asked)
