"""The plug-in hooks the model that a worker loads, once, and only where it is asked to."""

from __future__ import annotations

import json
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from test_vllm_kv_hook import Model

from assay.engines.scoring import HookSpec
from assay.engines.vllm import hooks as plugin
from assay.errors import AssayError, UsageError


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Worker:
        def __init__(self, tensor_parallel: int = 1, eager: bool = True) -> None:
            self.vllm_config = SimpleNamespace(
                parallel_config=SimpleNamespace(tensor_parallel_size=tensor_parallel),
                model_config=SimpleNamespace(enforce_eager=eager),
            )

        def load_model(self) -> None:
            model = Model()
            self.model_runner = SimpleNamespace(
                get_model=lambda: model, requests={}, execute_model=lambda scheduled: None
            )

    module = ModuleType("vllm.v1.worker.gpu_worker")
    module.Worker = Worker  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.worker"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return Worker


def ask(monkeypatch: pytest.MonkeyPatch, **config: Any) -> None:
    spec = {"target": "test_vllm_kv_hook:Recording", "config": config}
    monkeypatch.setenv(plugin.HOOK, json.dumps(spec))


def test_it_hooks_the_loaded_model_once(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(monkeypatch, placement="pre_rope", v_shift=1.0)
    plugin.register()
    plugin.register()
    loaded = worker()
    loaded.load_model()
    plain, changed = Model().run(), loaded.model_runner.get_model().run()
    torch.testing.assert_close(changed[0][2], plain[0][2] + 1.0)
    loaded.assay_hooks.commit()
    assert loaded.assay_hooks.engagement().fires == 3


def test_a_step_that_ran_without_the_hook_is_an_error(
    worker: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(monkeypatch, placement="pre_rope")
    plugin.register()
    loaded = worker()
    loaded.load_model()
    loaded.model_runner.execute_model(SimpleNamespace(num_scheduled_tokens={}))
    with pytest.raises(AssayError, match="skipped in layers"):
        loaded.model_runner.execute_model(SimpleNamespace(num_scheduled_tokens={"r": 1}))


def test_it_reports_what_came_of_it(
    worker: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(plugin.REPORT, str(tmp_path / "report.json"))
    ask(monkeypatch, placement="pre_rope")
    plugin.register()
    worker().load_model()
    assert json.loads((tmp_path / "report.json").read_text()) == {"layers": 3}
    with pytest.raises(AssayError):
        worker(eager=False).load_model()
    found = json.loads((tmp_path / "report.json").read_text())
    assert "CUDA graphs" in found["error"]
    assert "enforce_eager" in found["remedy"]


def test_another_model_runner_is_refused(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(monkeypatch, placement="pre_rope")
    plugin.register()
    loaded = worker()
    loaded.model_runner = SimpleNamespace()
    with pytest.raises(UsageError, match="keeps its requests"):
        plugin._hooked(HookSpec("test_vllm_kv_hook:Recording", {}), loaded)


def test_without_the_variable_nothing_happens(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(plugin.HOOK, raising=False)
    inner = worker.load_model
    plugin.register()
    assert worker.load_model is inner


def test_what_cannot_be_hooked_ends_the_start(worker: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(monkeypatch, placement="pre_rope")
    plugin.register()
    with pytest.raises(UsageError, match="tensor parallelism"):
        worker(tensor_parallel=2).load_model()
    with pytest.raises(AssayError, match="CUDA graphs"):
        worker(eager=False).load_model()
    monkeypatch.setenv(plugin.HOOK, "{")
    with pytest.raises(UsageError, match="holds no hook"):
        plugin.register()


def test_vllm_finds_it_by_its_entry_point() -> None:
    found = [e for e in entry_points(group="vllm.general_plugins") if e.name == "assay"]
    if not found:
        pytest.skip("this installation of assay is older than the entry point")
    assert found[0].load() is plugin.register
