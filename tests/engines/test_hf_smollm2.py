"""The engine on a real small model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from assay.engines import Capability, Message, Request
from assay.engines.hf.engine import HfEngine
from assay.errors import AssayError

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[HfEngine]:
    with HfEngine.load(f"hf:{smollm2}") as loaded:
        yield loaded


def ask(text: str, **settings: object) -> Request:
    return Request(messages=(Message("user", text),), max_tokens=60, **settings)  # type: ignore[arg-type]


def test_it_knows_the_capital_of_france_and_stops(engine: HfEngine) -> None:
    assert Capability.CHAT in engine.capabilities
    greedy, warm = engine.generate_batch(
        [
            ask("What is the capital of France?"),
            ask("What is the capital of France?", temperature=0.7, seed=1),
        ]
    )
    # So small a model names another place now and then when it is sampled.
    assert "Paris" in greedy.content
    assert greedy.finish_reason == "stop"
    for reply in (greedy, warm):
        assert "<|im_end|>" not in reply.content


def test_english_costs_few_bits_and_noise_many(engine: HfEngine) -> None:
    english = "The sun was setting behind the hills, and the children walked home along the river."
    noise = "qzx vbn wrt plk mjh gfd zxc qwp oiu ytr ewq lkj hgf dsa mnb vcx zlk jhg fds apo"
    good, bad = engine.score(english).bits_per_byte, engine.score(noise).bits_per_byte
    assert good is not None
    assert bad is not None
    assert good < 1.6 < 3 < bad


def test_describe_names_versions_but_no_path(engine: HfEngine, smollm2: Path) -> None:
    described = engine.describe()
    assert described["dtype"] == "bfloat16"
    assert described["model"] == smollm2.name
    assert str(smollm2) not in repr(described)


def test_a_quantiser_that_is_not_installed_is_named(smollm2: Path, tmp_path: Path) -> None:
    for file in smollm2.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((smollm2 / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 64,
        "zero_point": True,
    }
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(AssayError, match="gptqmodel") as raised:
        HfEngine.load(f"hf:{tmp_path}")
    assert raised.value.finding_id == "fidelity.engine_missing"


def test_a_tensor_that_is_missing_is_not_made_up(smollm2: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    for file in smollm2.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).symlink_to(file)
    tensors = load_file(smollm2 / "model.safetensors")
    del tensors["model.layers.7.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        AssayError, match=r"1 of its tensors .* model\.layers\.7\.mlp\.up_proj\.weight"
    ):
        HfEngine.load(f"hf:{tmp_path}")
