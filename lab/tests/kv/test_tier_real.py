"""The tier behind vLLM's real cache: what leaves comes back, and what is damaged is computed
again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import httpx
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("numba")

from assay.demo import vllm_python
from assay.serving.launch import free_port
from assay_lab.kv.block_tables import tables_for
from assay_lab.kv.calibrate import CalibrationPlan, run_calibrate
from assay_lab.kv.serve import plugin_folder
from kv.tier_samples import drawn, sample

pytestmark = [pytest.mark.engine, pytest.mark.slow]

ENGINE = """
import json, os, sys
os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
from pathlib import Path
from vllm import LLM, SamplingParams
job = json.loads(sys.argv[1])
extra = {name: job[name] for name in ("tables", "folder", "report")} | {"size": 10**8}
llm = LLM(job["model"], dtype="bfloat16", enforce_eager=True, max_model_len=1024, kv_transfer_config={
    "kv_connector": "AssayTier", "kv_connector_module_path": "assay_lab.kv.connector", "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra})
core = llm.llm_engine.engine_core.engine_core
from vllm.distributed.kv_transfer import get_kv_transfer_group
mover = get_kv_transfer_group()._mover
found = []
def ask(*prompts, **more):
    llm.reset_prefix_cache()
    how = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, logprobs=20, **more)
    answers = llm.generate([{"prompt_token_ids": p} for p in prompts], how, use_tqdm=False)
    mover.flush()
    for a in answers:
        logprobs = {str(t): l.logprob for t, l in a.outputs[0].logprobs[0].items()}
        found.append({"cached": a.num_cached_tokens, "first": logprobs, **mover.store.counters.to_json()})
for step in job["steps"]:
    if step == "damage":
        path = sorted(Path(job["folder"]).rglob("*.block"))[0]
        raw = bytearray(path.read_bytes()); raw[-50] ^= 1; path.write_bytes(raw)
    elif isinstance(step, dict):
        ask(step["prompt"], prompt_logprobs=1)
    else:
        ask(*step)
core.shutdown()
Path(job["out"]).write_text(json.dumps(found))
"""  # noqa: E501


PAGES = """
from types import SimpleNamespace as Some
import torch
from assay_lab.kv.connector import VllmPages
def check(cache, put):
    caches, spec = [cache[i] for i in range(3)], Some(num_kv_heads=2, head_size=8, block_size=16)
    def update(module, k, v, page, slots):
        for n, slot in enumerate(slots.tolist()):
            put(page[slot // 16], slot % 16, k[n], v[n])
    module = Some(impl=Some(do_kv_cache_update=update))
    pages = VllmPages({i: (module, c) for i, c in enumerate(caches)}, spec, 3)
    target, x, slots = pages._target(), torch.randn(3, 2, 40, 16).bfloat16(), torch.randperm(80)[:40].numpy()
    pages.write(slots, x)
    flat = torch.as_strided(target.out, (cache.untyped_storage().nbytes() // 2,), (1,), 0)
    for n, slot in enumerate(slots):
        at = slot // 16 * target.stride + target.table[:, slot % 16]
        found = flat[at[..., None] + torch.arange(8)].view(3, 2, 16)
        assert torch.equal(found, x[:, :, n]), (n, slot)
def side_by_side(page, slot, k, v):
    page[:, slot, :8], page[:, slot, 8:] = k, v
def apart(page, slot, k, v):
    page[0, slot], page[1, slot] = k, v
def crossed(page, slot, k, v):
    page[0, :, :, slot], page[1, :, :, slot] = k, v
zeros = lambda *shape: torch.zeros(*shape, dtype=torch.bfloat16)
check(zeros(3, 5, 2, 16, 16), side_by_side)
check(zeros(3, 5, 16, 2, 16).transpose(2, 3), side_by_side)
check(zeros(3, 5, 2, 16, 2, 8), apart)
module = Some(impl=Some(do_kv_cache_update=lambda m, k, v, page, slots: [crossed(page[0], i, k[i], v[i]) for i in range(16)]))
spec = Some(num_kv_heads=2, head_size=8, block_size=16)
assert VllmPages({0: (module, zeros(5, 2, 2, 8, 16))}, spec, 1)._target() is None
"""  # noqa: E501


def test_pages_say_where_a_kernel_may_write_however_they_are_laid_out() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "PYTHONPATH": str(plugin_folder())}
    subprocess.run([str(vllm_python()), "-c", PAGES], env=environment, check=True, timeout=120)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Three random layers with heads as vLLM's CPU attention takes them, and their tables."""
    import transformers

    from tiny_target import make_target

    folder = tmp_path_factory.mktemp("tier")
    make_target(folder / "model", layers=1)  # for its tokenizer
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=320,
        max_position_embeddings=2048,
        eos_token_id=319,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    made = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for weight in made.parameters():
            if weight.ndim == 2:
                weight.normal_(0, 0.12)
    made.bfloat16().save_pretrained(folder / "model")
    (folder / "text").write_text("\n".join(topics[name] for name in sorted(topics)))
    plan = CalibrationPlan(
        str(folder / "model"),
        folder / "c",
        text=(str(folder / "text"),),
        windows=8,
        length=256,
        tokens=1600,
    )
    run_calibrate(plan)
    spec = "prerope+sinks(n=4)+pca(bits=5, predict=all)"
    tables = tables_for(str(folder / "model"), spec, str(folder / "c"), folder)
    return {
        "model": str(folder / "model"),
        "codec": spec,
        "calibration": str(folder / "c"),
        "tables": str(folder / f"{tables.digest.hex()}.tables"),
        "folder": str(folder / "tier"),
        "report": str(folder / "report"),
        "out": str(folder / "out"),
    }


def engine(job: dict[str, Any], *steps: Any) -> list[dict[str, Any]]:
    environment = {**os.environ, "PYTHONPATH": str(plugin_folder())}
    command = [str(vllm_python()), "-c", ENGINE, json.dumps({**job, "steps": steps})]
    subprocess.run(command, env=environment, check=True, timeout=300)
    found: list[dict[str, Any]] = json.loads(Path(job["out"]).read_text())
    return found


def prompts(model: str) -> tuple[list[int], list[int]]:
    """600 tokens each of two places of the text: of random tokens the stored blocks are hardly
    smaller.
    """
    import transformers

    text = topics["class"] + topics["function"] + topics["assignment"]
    ids: list[int] = transformers.AutoTokenizer.from_pretrained(model)(text).input_ids
    return ids[:600], ids[1000:1600]


def apart(a: dict[str, float], b: dict[str, float]) -> float:
    both = a.keys() & b.keys()
    return max(abs(a[token] - b[token]) for token in both) if len(both) > 9 else float("inf")


def test_a_prefix_returns_in_its_engine_and_in_the_next_and_damage_is_computed_again(
    model: dict[str, Any],
) -> None:
    p, other = prompts(model["model"])
    q = p[:400] + other[:100]
    first, again, shared = engine(model, [p], [p], [q])
    assert first["cached"] == 0 and first["stored_blocks"] == 4 and first["ratio"] > 2
    # Keys and values of all four blocks: none in another place, or order, or without its rotation.
    assert again["cached"] == 512 and again["loaded_tokens"] == 512
    assert apart(first["first"], again["first"]) < 0.3
    assert apart(first["first"], shared["first"]) > 0.3
    assert shared["cached"] == 384 and shared["refused"] == 0
    assert json.loads(Path(model["report"]).read_text())["tier"]["requests_hit"] == 2
    # The next engine reads what the last one wrote, but for the block that has lost a bit.
    damaged, whole, *batch, computed = engine(
        model, "damage", [p], [p], [p, q, p[:300]], {"prompt": p}
    )
    assert damaged["refused"] == 1 and damaged["recomputed_tokens"] >= 128
    assert apart(first["first"], damaged["first"]) < 0.3
    assert whole["refused"] == 1 and whole["loaded_tokens"] - damaged["loaded_tokens"] == 512
    assert apart(first["first"], whole["first"]) < 0.3
    assert [answer["cached"] for answer in batch] == [512, 384, 256]
    assert (
        computed["cached"] == 0
    )  # vLLM has log-probabilities of no token of the prompt that it did not compute


def served(model: dict[str, Any], folder: Path, prompt: list[int]) -> tuple[str, dict[str, Any]]:
    """`assay kv serve --tier stream` from its start to its end by SIGINT: what it answered, and its
    report.
    """
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [
        sys.executable,
        "-m",
        "assay",
        "kv",
        "serve",
        model["model"],
        "--tier",
        "stream",
        "--codec",
        model["codec"],
        "--calibration",
        model["calibration"],
        "--tier-size",
        0.1,
        "--tier-dir",
        folder / "tier",
        "--python",
        vllm_python(),
        "--json",
        "--",
        "--port",
        port,
        "--max-model-len",
        1024,
        "--dtype",
        "bfloat16",
        "--enforce-eager",
        "--served-model-name",
        "m",
    ]
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*map(str, command)], env=environment, stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        until = time.monotonic() + 300
        while True:
            assert process.poll() is None and time.monotonic() < until, (
                folder / "log"
            ).read_text()[-3000:]
            with suppress(httpx.TransportError):
                if httpx.get(f"{url}/health").status_code == 200:
                    break
            time.sleep(1)
        asked = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=120).json()
        time.sleep(3)  # blocks are encoded behind the answer
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, (folder / "log").read_text()[-3000:]
    return answer["choices"][0]["text"], json.loads(out)["results"]["tier"]


def test_the_server_stores_a_prefix_and_the_next_server_loads_it(
    model: dict[str, Any], tmp_path: Path
) -> None:
    _, prompt = prompts(model["model"])
    answer, first = served(model, tmp_path, prompt)
    assert first["stored_blocks"] == 4 and first["requests_hit"] == 0 and first["ratio"] > 2
    again, second = served(model, tmp_path, prompt)
    assert second["loaded_tokens"] == 512 and second["requests_hit"] == 1 and second["refused"] == 0
    assert answer and again


def test_lmcache_takes_the_serialiser_and_misses_a_damaged_chunk(tmp_path: Path) -> None:
    serde = pytest.importorskip("lmcache.v1.distributed.serde")
    from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
    from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

    from assay_lab.kv.tier.lmcache import register_lmcache

    def held(x: torch.Tensor) -> Any:
        raw = x.contiguous().view(torch.uint8).flatten()
        facts = MemoryObjMetadata(
            shape=x.shape,
            dtype=x.dtype,
            address=0,
            phy_size=raw.numel(),
            ref_count=1,
            fmt=MemoryFormat.KV_2LTD,
        )
        return TensorMemoryObj(raw, facts, None)

    def done(query: Any, task: int) -> bool:
        while (found := query(task)) is None:
            pass
        return bool(found)

    path = sample("sinks(n=4)+pca(bits=2)").tables.write(tmp_path)
    register_lmcache("assay-test")
    processor = serde.create_serde_processor(
        serde.SerdeConfig("assay-test", {"tables": str(path), "ratio": 3.0})
    )
    x = drawn(256, 4).bfloat16().transpose(0, 1).contiguous()
    room = processor.estimate_serialized_size(MemoryLayoutDesc([x.shape], [x.dtype]))
    source, stored, back = (
        held(x),
        held(torch.zeros(room, dtype=torch.uint8)),
        held(torch.zeros_like(x)),
    )
    key = ObjectKey(chunk_hash=b"12345678", model_name="m", kv_rank=0)
    assert done(
        processor.query_serialize_result, processor.submit_serialize([source], [stored], [key])
    )
    assert done(
        processor.query_deserialize_result, processor.submit_deserialize([stored], [back], [key])
    )
    assert (back.tensor - x).float().square().mean() < 0.02 * x.float().square().mean()
    stored.tensor[300] ^= 1
    assert not done(
        processor.query_deserialize_result, processor.submit_deserialize([stored], [back], [key])
    )
    processor.close()
