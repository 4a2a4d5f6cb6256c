"""Engines on a real Ray cluster of two nodes on this machine: the same numbers, lost workers and
nodes, other set-ups.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import count, cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
# Before Ray is imported, which reads it then: on one machine nobody needs a token.
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_WAIT_POLICY": "PASSIVE", "RAY_AUTH_MODE": "disabled"}
os.environ.update(QUIET)
ray = pytest.importorskip("ray")
from assay.cli.main import _json_in_one_word
from assay.engines.ray_scorer import AHEAD, TRIES, Actor, Needs, Pool, RayScorer, _joined
from assay.engines.ray_worker import Worker
from assay.engines.scoring import Engagement, HookSpec, ScoreJob, TokenizerFacts, Window
from assay.errors import AssayError, UsageError
from assay.fidelity.compare import run_compare
from assay.fidelity.plan import Plan
from assay.options import is_address
from assay.serving.launch import free_port
from assay_lab.gap.gap import run_gap
from assay_lab.gap.plan import GapPlan
from assay_lab.kv.sweep import run_sweep
from assay_lab.options import SweepPlan
from tiny_target import make_target

RAY = Path(sys.executable).with_name("ray")


# Options, and what needs no cluster.


def test_an_address_may_follow_the_flag_and_need_not() -> None:
    assert _json_in_one_word(["compare", "a", "b", "--ray"])[-1] == "--ray=local"
    assert _json_in_one_word(["compare", "--ray", "10.0.0.1:6379", "a"])[1:] == [
        "--ray=10.0.0.1:6379",
        "a",
    ]
    assert _json_in_one_word(["compare", "--ray", "hf:./a?threads=1", "b"])[1] == "--ray=local"
    assert _json_in_one_word(["compare", "--ray", "local", "b"])[1:] == ["--ray=local", "b"]
    assert is_address("auto") and is_address("head.node:6379") and not is_address("gguf:file.gguf")


def test_wrong_uses_are_refused() -> None:
    for wrong in ({"workers": 2}, {"ray": "ray://h:1"}, {"ray": "somewhere"}):
        with pytest.raises(UsageError):
            Plan("hf:a", ("hf:b",), **wrong)


def test_a_cluster_changes_no_key_of_a_run() -> None:
    plan = Plan("hf:a", ("hf:b",))
    assert replace(plan, ray="local", workers=3).sha256 == plan.sha256


def test_a_node_holds_as_many_workers_as_their_threads_and_gpus_allow() -> None:
    assert Needs(4, 4, 0).fits({"CPU": 9.0}) == 2
    assert Needs(16, 1, 2).fits({"CPU": 16.0, "GPU": 8.0}) == 4
    assert Needs(1, 1, 1).fits({"CPU": 16.0}) == 0


def test_what_took_part_in_batches_adds_up_in_their_order() -> None:
    def part(*streams: int) -> Engagement:
        note = {"kv": {"tables": 7, "streams": {"0.k": list(streams)}}}
        return Engagement(2, 10, {0: 1, 1: 1}, note)

    found = _joined(_joined(Engagement(), part(1, 2)), part(3))
    assert (found.fires, found.bytes_read, found.per_layer) == (4, 20, {0: 2, 1: 2})
    assert found.notes == {"kv": {"tables": 7, "streams": {"0.k": [1, 2, 3]}}}


def test_the_batch_of_a_run_is_the_least_that_any_worker_chooses() -> None:
    class Pool:
        def all(self, *asked: Any) -> list[int]:
            return [8, 4, 16]

    scorer = object.__new__(RayScorer)
    scorer._pool, scorer.spec, scorer._sizes = Pool(), "hf:a", {}  # type: ignore[assignment]
    windows = [Window(0, (1, 2, 3))]
    noise = HookSpec("assay.fidelity.breakdown.rounding:RoundingNoise", {"sigma": 0.1, "seed": 0})
    assert (
        scorer._together(windows, ScoreJob(batch=0))
        == scorer._together(windows, ScoreJob(batch=0, hook=noise))
        == 4
    )
    assert scorer._together(windows, ScoreJob(batch=2)) == 2


class Scripted:
    """Ray, where every answer is there at once: what was asked for, or an error of Ray's own."""

    exceptions = ray.exceptions

    def wait(self, answers: list[Any], **how: Any) -> tuple[list[Any], list[Any]]:
        return answers, []

    def get(self, answer: Any) -> Any:
        if isinstance(answer[-1], Exception):
            raise answer[-1]
        return answer[-1]

    def kill(self, handle: Any) -> None:
        pass


def scripted_pool(answers: Callable[..., Any]) -> Pool:
    """A pool of one worker that says what `answers` gives; a lost one is replaced at once."""
    pool = Pool("local", 1)
    asked = count()
    handle = SimpleNamespace(
        score=SimpleNamespace(remote=lambda *given: (next(asked), answers(*given[1:])))
    )

    def hire() -> None:
        pool._actors.append(Actor(handle, "node", opened={"spec"}))

    pool._ray, pool._count, pool._hire = Scripted(), 1, hire  # type: ignore[method-assign]
    hire()
    return pool


def test_losses_with_work_done_between_them_end_no_run() -> None:
    lost = ray.exceptions.ActorDiedError()
    turns = cycle((True, False, False))
    pool = scripted_pool(lambda unit: lost if next(turns) else unit)
    units = [lambda unit=unit: ("score", (unit,)) for unit in range(40)]
    assert list(pool.map("spec", units)) == list(range(40))
    assert len(pool._lost) > 3 * TRIES
    with pytest.raises(AssayError, match=r"cannot be kept|was lost"):
        list(scripted_pool(lambda: lost).map("spec", [lambda: ("score", ())]))


def test_a_reference_that_cannot_be_read_occupies_no_worker() -> None:
    def damaged() -> tuple[str, tuple[Any, ...]]:
        raise AssayError(
            "the store is damaged", finding_id="fidelity.store_damaged", remedy="score it again"
        )

    pool = scripted_pool(lambda: 1)
    for _ in range(AHEAD + 1):
        with pytest.raises(AssayError, match="damaged"):
            list(pool.map("spec", [damaged]))
    assert pool._actors[0].load == 0 and list(pool.map("spec", [lambda: ("score", ())])) == [1]


def test_what_cannot_be_joined_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AssayError, match=r"no Ray cluster can be joined at a\.\.b:80"):
        Pool("a..b:80", 1)._connect()
    pool = Pool("auto", 1)

    def init(**how: Any) -> None:
        raise ray.exceptions.AuthenticationError("a token is asked for\nas follows")

    pool._ray = SimpleNamespace(init=init, exceptions=ray.exceptions)
    with pytest.raises(AssayError, match="joined at auto: a token is asked for") as error:
        pool._connect()
    assert "RAY_AUTH_MODE=token" in error.value.remedy and "\n" not in error.value.message


def test_room_that_was_free_is_no_part_of_a_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def opened(tokens: int, dtype: str = "bfloat16") -> Any:
        facts = {"engine": "vllm", "dtype": dtype, "kv_cache_tokens": tokens}
        engine = SimpleNamespace(
            describe=lambda: facts,
            ability=None,
            tokenizer=TokenizerFacts("s", 1, None, lambda t: [], lambda i: ""),
        )
        monkeypatch.setattr("assay.engines.ray_worker.open_scorer", lambda spec: engine)
        return Worker(1).open("vllm:model")

    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr("assay.engines.ray_worker.model_files", lambda spec: {})
    one, other, wider = opened(1_000), opened(1_016), opened(1_000, "float16")
    assert one.setup == other.setup != wider.setup and other.facts["kv_cache_tokens"] == 1_016


@pytest.mark.parametrize(
    ("facts", "scored"),
    [({"vllm": "0.1"}, 34), ({"vllm": "0.1", "kv_cache_tokens": 7}, 34), ({"vllm": "0.2"}, 40)],
)
def test_a_run_goes_on_with_nothing_that_another_version_scored(
    cache: Callable[[str], None],
    plan: Plan,
    monkeypatch: pytest.MonkeyPatch,
    facts: dict[str, Any],
    scored: int,
) -> None:
    from assay.engines.hf.scorer import HfScorer
    from assay.fidelity import score

    def of_the_candidate(more: dict[str, Any]) -> None:
        monkeypatch.setattr(
            HfScorer, "describe", lambda s: own(s) | (more if own(s)["model"] == "other" else {})
        )

    def interrupt() -> None:
        raise KeyboardInterrupt

    own, statistics, seen = HfScorer.describe, score.window_statistics, list[int]()
    of_the_candidate({"vllm": "0.1"})
    plan = replace(plan, floors=False, greedy=0)
    assert run_compare(plan, Meanwhile({6: interrupt})).interrupted
    of_the_candidate(facts)
    monkeypatch.setattr(
        score, "window_statistics", lambda a, b: seen.append(a.window.index) or statistics(a, b)
    )
    assert run_compare(plan).results["windows"] == 40
    assert len(seen) == scored


# A cluster of two nodes.


class Cluster:
    """A head with one CPU, and nodes that come and go."""

    def __init__(self, folder: Path) -> None:
        self.env = {**os.environ, **QUIET, "ASSAY_CACHE": str(folder / "nodes")}
        port = free_port()  # another run of the tests may have a cluster on this machine
        self.address = f"127.0.0.1:{port}"
        self._nodes: list[subprocess.Popen[bytes]] = []
        self._log = (folder / "log").open("wb")
        self.start("--head", f"--port={port}", "--include-dashboard=false")
        until = time.monotonic() + 60
        while socket.socket().connect_ex(("127.0.0.1", port)):
            assert time.monotonic() < until, (folder / "log").read_text()
            time.sleep(0.2)

    def start(self, *words: str, **env: str) -> subprocess.Popen[bytes]:
        words = words or (f"--address={self.address}",)
        memory = f"--object-store-memory={100 << 20}"
        node = subprocess.Popen(
            [
                RAY,
                "start",
                *words,
                "--num-cpus=1",
                memory,
                "--min-worker-port=0",
                "--max-worker-port=0",
                "--block",
            ],
            env={**self.env, **env},
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        self._nodes.append(node)
        return node

    def stop(self, node: subprocess.Popen[bytes]) -> None:
        """As a spot machine goes: all its processes at once."""
        with_children = [node.pid, *_descendants(node.pid)]
        for pid in with_children:
            _kill(pid)
        node.wait()
        self._nodes.remove(node)

    def close(self) -> None:
        for node in list(self._nodes):
            self.stop(node)


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if parent == pid:
                found += [int(entry.name), *_descendants(int(entry.name))]
    return found


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Two targets that differ a little, and a text."""
    import shutil

    import torch
    import transformers

    folder = tmp_path_factory.mktemp("ray")
    one, other, text = folder / "one", folder / "other", folder / "text.txt"
    make_target(one, layers=2)
    shutil.copytree(one, other)
    model = transformers.AutoModelForCausalLM.from_pretrained(one)
    torch.manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.02 * weight.std())
    model.save_pretrained(other)
    text.write_text(
        " ".join(f"the {i % 97} stones of river {i % 31} are {i % 7} feet wide" for i in range(900))
    )
    return one, other, text


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in QUIET.items():
            patch.setenv(name, value)
        found = Cluster(tmp_path_factory.mktemp("cluster"))
        try:
            yield found
        finally:
            ray.shutdown()
            found.close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Takes another cache folder."""
    for name, value in QUIET.items():
        monkeypatch.setenv(name, value)

    def use(name: str) -> None:
        monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / name))

    use("first")
    return use


@pytest.fixture
def plan(models: tuple[Path, Path, Path]) -> Plan:
    one, other, text = models
    return Plan(
        f"hf:{one}",
        (f"hf:{other}",),
        text=(str(text),),
        windows=40,
        length=64,
        batch=2,
        threads=1,
        greedy=4,
        all=True,
    )


def numbers(report: Any) -> str:
    """All of a report but what it says of the cluster itself, and of the memory of this process."""
    found = report.to_json() if hasattr(report, "to_json") else report
    found = json.loads(json.dumps(found, default=str))
    found["environment"].pop("cluster", None)
    found["results"].pop("memory", None)
    found["findings"] = [f for f in found["findings"] if f["id"] != "fidelity.worker_lost"]
    return json.dumps(found, sort_keys=True)


def wait_for_nodes(cluster: Cluster, count: int) -> None:
    """Until so many nodes have joined."""
    if not ray.is_initialized():
        ray.init(cluster.address, log_to_driver=False, logging_level="ERROR")
    until = time.monotonic() + 60
    while sum(n["Alive"] for n in ray.nodes()) != count:
        assert time.monotonic() < until
        time.sleep(0.2)


class Meanwhile:
    """Progress that does things once so many windows of a candidate are scored."""

    def __init__(self, acts: dict[int, Callable[[], Any]]) -> None:
        self._acts, self.lines = acts, list[str]()

    def __call__(self, what: str, steps: int) -> Any:
        from contextlib import contextmanager

        @contextmanager
        def opened() -> Iterator[Callable[[], None]]:
            self.lines.append(what)
            count = 0

            def advance() -> None:
                nonlocal count
                count += 1
                if "scoring hf:other" in what and count in self._acts:
                    self._acts[count]()

            yield advance

        return opened()


def workers_of_assay() -> list[int]:
    """Processes of actors of this machine's Ray."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and b"ray::Worker" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.engine
def test_a_cluster_gives_the_same_numbers_and_survives_its_losses(
    cluster: Cluster, cache: Callable[[str], None], plan: Plan
) -> None:
    spot = cluster.start()
    wait_for_nodes(cluster, 2)
    there = replace(plan, ray=cluster.address)

    expected = numbers(run_compare(plan))

    def interrupt() -> None:
        raise KeyboardInterrupt

    # Interrupted on the cluster, the run goes on without it.
    cache("from there")
    assert run_compare(there, Meanwhile({6: interrupt})).interrupted
    assert numbers(run_compare(plan)) == expected

    # Interrupted without the cluster, the run goes on there; a worker dies, then a node.
    cache("from here")
    assert run_compare(plan, Meanwhile({6: interrupt})).interrupted
    losses = Meanwhile({10: lambda: _kill(workers_of_assay()[0]), 26: lambda: cluster.stop(spot)})
    report = run_compare(there, losses)
    assert numbers(report) == expected
    assert report.environment["cluster"]["workers"] == 2
    assert report.environment["cluster"]["lost"] >= 2
    assert any(line.startswith("lost a worker on node ") for line in losses.lines)
    until = time.monotonic() + 10
    while workers_of_assay():
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.engine
@pytest.mark.slow
def test_sweeps_and_gaps_give_the_same_numbers(
    cluster: Cluster, cache: Callable[[str], None], models: tuple[Path, Path, Path]
) -> None:
    one, other, text = models
    cluster.start()
    wait_for_nodes(cluster, 2)
    sweep = SweepPlan(
        f"hf:{one}?threads=1",
        codecs=("hadamard(bits=4)", "fp8", "hadamard(bits=2)"),
        text=(str(text),),
        windows=6,
        fresh=4,
        length=64,
        batch=2,
    )
    gap = GapPlan(
        f"hf:{one}?threads=1",
        f"hf:{other}?threads=1",
        codec="hadamard(bits=4)",
        text=(str(text),),
        windows=4,
        fresh=2,
        length=64,
        batch=2,
        phases=(1, 3),
        sweep=(0.5, 1.0),
    )
    for run, asked in ((run_sweep, sweep), (run_gap, gap)):
        found = []
        for where in ("", cluster.address):
            cache(f"{run.__name__} {where}")
            found.append(without_seconds(json.loads(numbers(run(replace(asked, ray=where))))))
        assert found[0] == found[1]


@pytest.mark.engine
def test_the_text_of_a_head_is_the_same(
    cluster: Cluster, models: tuple[Path, Path, Path], cache: Any
) -> None:
    from assay.engines.hf.engine import HfEngine
    from assay_lab.heads.prompts import prompts
    from assay_lab.heads.text import (
        TEMPERATURES,
        generate_texts,
        on_workers,
        side_by_side,
        with_transformers,
    )

    one, _, text = models
    spec = f"hf:{one}?threads=1"
    with HfEngine.load(spec) as engine:
        asked = prompts(engine.tokenizer, 24, [str(text)])
        expected = generate_texts(
            asked,
            with_transformers(engine.model, engine.tokenizer),
            12,
            TEMPERATURES,
            None,
            chunk=4,
        )
        with Pool(cluster.address, 0) as pool:
            spread = on_workers(pool, spec)
            write = side_by_side(asked, lambda *given: [], 12, TEMPERATURES, None, 4, spread)
            found = generate_texts(asked, write, 12, TEMPERATURES, None, chunk=4)
    assert found == expected and {t.temperature for t in found} == set(TEMPERATURES)


def without_seconds(value: Any) -> Any:
    """A result without what a clock said."""
    if isinstance(value, dict):
        return {
            k: without_seconds(v)
            for k, v in value.items()
            if k not in ("fit_s", "score_s", "seconds")
        }
    return [without_seconds(v) for v in value] if isinstance(value, list) else value


@pytest.mark.engine
def test_a_node_of_another_set_up_is_refused_by_name(
    cluster: Cluster, cache: Callable[[str], None], plan: Plan, tmp_path: Path
) -> None:
    for node in cluster._nodes[1:]:
        cluster.stop(node)
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as m\nown = m.version\nm.version = lambda n: '1.0.0' if n =="
        " 'torch' else own(n)\n"
    )
    node = cluster.start(PYTHONPATH=f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    wait_for_nodes(cluster, 2)
    with pytest.raises(
        AssayError, match=r"node \S+ \(\w{8}\) has another set-up .* torch 1\.0\.0 in place of"
    ) as error:
        run_compare(replace(plan, ray=cluster.address))
    assert error.value.finding_id == "fidelity.other_setup"
    assert "\n" not in error.value.message
    cluster.stop(node)
    wait_for_nodes(cluster, 1)
    with pytest.raises(UsageError, match="room for 1 worker with 1 thread each, not for 2"):
        run_compare(replace(plan, ray=cluster.address, workers=2))


def test_no_cluster_and_no_ray_are_one_line(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, cache: Callable[[str], None]
) -> None:
    ray.shutdown()
    with pytest.raises(
        AssayError, match=r"no Ray cluster can be joined at 127\.0\.0\.1:1: Connection refused"
    ):
        run_compare(replace(plan, ray="127.0.0.1:1"))
    monkeypatch.setattr("assay.engines.ray_scorer.find_spec", lambda name: None)
    with pytest.raises(AssayError) as error:
        run_compare(replace(plan, ray="local"))
    assert error.value.remedy == "pip install 'llm-assay[ray]'"


@pytest.mark.engine
def test_ctrl_c_ends_a_local_run_with_130_and_leaves_nothing(
    models: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    one, other, text = models
    env = {**os.environ, **QUIET, "ASSAY_CACHE": str(tmp_path)}
    words = [
        "compare",
        f"hf:{one}",
        f"hf:{other}",
        "--text",
        text,
        "--windows",
        "300",
        "--length",
        "64",
        "--batch",
        "1",
    ]
    run = subprocess.Popen(
        [sys.executable, "-m", "assay", *words, "--threads", "1", "--ray", "--json"],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    lines: list[str] = []
    assert run.stderr and run.stdout
    for line in run.stderr:
        lines.append(line)
        if line.startswith("scoring hf:one"):
            break
    children = _descendants(run.pid)
    threading.Thread(target=run.stderr.read, daemon=True).start()
    time.sleep(0.5)
    run.send_signal(signal.SIGINT)
    found = json.loads(run.stdout.read())
    assert run.wait(30) == 130, lines
    assert found["results"]["scored"]["of"] == 300
    until = time.monotonic() + 20
    while alive := [pid for pid in children if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < until, alive
        time.sleep(0.2)
