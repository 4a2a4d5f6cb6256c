"""Two ranks of the stand-in engine, each a thread with its rows of the head: what one process
gives, and what is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from vllm_stand_in import VOCAB, WIDTH, Engine, ToyModel, install

from assay.engines.scoring import Head, ScoreJob, ScoringPath, StateRows, Window
from assay.engines.vllm import core as core_module
from assay.engines.vllm import head, worker
from assay.engines.vllm.core import VllmCore, unequal
from assay.engines.vllm.head import HeadFile, output_head
from assay.engines.vllm.spec import VllmSpec, parse_vllm
from assay.engines.vllm.start import REPORTS
from assay.engines.vllm.worker import Place, ScoringExtension, merged
from assay.errors import AssayError, UsageError
from assay.fidelity.metrics.token_statistics import RowStatistics, window_statistics
from together import Together

STATISTICS = "assay.fidelity.metrics.token_statistics:batch_statistics"
WINDOWS = [Window(i, tuple((7 * i + 3 * j * j) % VOCAB for j in range(24))) for i in range(5)]
DEATHS = core_module._Deaths
PADDED = {2: 32, 3: 22}  # vLLM pads 50 rows to 64, or what the ranks divide


class RankRunner:
    """One rank's model runner: the states of the stand-in, and its rows of the head."""

    def __init__(self, engine: Engine, rank: int, ranks: int) -> None:
        self._engine = engine
        self.execute_model_state: Any = None
        whole, each = engine.model.lm_head.weight, PADDED[ranks]
        lo, hi = min(VOCAB, rank * each), min(VOCAB, (rank + 1) * each)
        rows = torch.cat([whole[lo:hi], torch.full((each - hi + lo, WIDTH), 9.0)])
        head = SimpleNamespace(
            weight=rows,
            quant_method=engine.model.lm_head.quant_method,
            shard_indices=SimpleNamespace(org_vocab_start_index=lo, org_vocab_end_index=hi),
        )
        self.model = SimpleNamespace(
            lm_head=head,
            logits_processor=engine.model.logits_processor,
            compute_logits=engine.model.compute_logits,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.runner, name)

    def get_model(self) -> Any:
        return self.model

    def execute_model(self, scheduler_output: Any) -> None:
        self.execute_model_state = self._engine.runner.execute_model_state


class RankedEngine(Engine):
    """The stand-in with a worker for every rank, whose calls run side by side."""

    def __init__(self, ranks: int) -> None:
        super().__init__()
        self.workers = []
        for rank in range(ranks):
            worker = type("Worker", (ScoringExtension,), {})()
            worker.model_runner = RankRunner(self, rank, ranks)
            worker.place = Place(rank, rank, ranks)
            self.workers.append(worker)
        inner = self.runner.execute_model

        def execute_model(scheduled: Any) -> None:
            inner(scheduled)
            for worker in self.workers:
                worker.model_runner.execute_model(scheduled)

        self.runner.execute_model = execute_model  # type: ignore[method-assign]

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        with ThreadPoolExecutor(len(self.workers)) as pool:
            return list(pool.map(lambda worker: getattr(worker, method)(*args), self.workers))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], tuple[VllmCore, RankedEngine]]:
    """Opens a core over so many ranks."""
    install(monkeypatch)
    monkeypatch.setattr(worker, "place_of", lambda worker: worker.place)
    monkeypatch.setattr(core_module, "_Deaths", lambda llm: None)

    def open_(ranks: int) -> tuple[VllmCore, RankedEngine]:
        engine, together = RankedEngine(ranks), Together(ranks)
        order = {id(w.model_runner): w.place.rank for w in engine.workers}
        reduce = worker.Rank.reduce

        def reduce_with_gather(self: Any, *arguments: Any) -> Any:
            own = partial(together.gather, order[id(self.runner)])
            self.gather = own
            return reduce(self, *arguments)

        monkeypatch.setattr(worker.Rank, "reduce", reduce_with_gather)
        return VllmCore(VllmSpec("toy", tensor_parallel=ranks), engine), engine

    return open_


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("own_head", [True, False])
def test_ranks_give_what_one_process_gives(opened: Any, ranks: int, own_head: bool) -> None:
    core, engine = opened(ranks)
    job = ScoreJob(ScoringPath.CHUNKED, scored_from=10, chunk=4, batch=5)
    weight = engine.model.lm_head.weight[:VOCAB]
    head = Head(weight if own_head else weight[: VOCAB - 3] + 0.1, softcap=None)
    windows = [Window(w.index, tuple(t % 40 for t in w.tokens)) for w in WINDOWS]
    states = [engine.model.states(w.tokens)[9:-1] for w in windows]
    references = [StateRows(w, 10, s + 0.1, head) for w, s in zip(windows, states, strict=True)]
    core.begin(job, 24)
    found = core.reduce(windows, references, STATISTICS)
    for values, reference, s in zip(found, references, states, strict=True):
        wanted = window_statistics(reference, StateRows(reference.window, 10, s, Head(weight)))
        for name, expected in vars(wanted).items():
            torch.testing.assert_close(values[name], expected, rtol=1e-5, atol=1e-6)
        assert RowStatistics(**values).kl.shape == (14,)
    held = engine.workers[0]._assay
    same = held._heads[0].weight.data_ptr() == held.head.weight.data_ptr()
    assert same == own_head  # what is the engine's own is not held twice
    assert sum(w._assay.head.vocab_size for w in engine.workers) == VOCAB  # nobody has a whole head
    assert torch.equal(core.head.weight, weight)
    bytes_of_heads = sum(found["heads"] for found in core.memory())
    assert bytes_of_heads == 4 * WIDTH * (VOCAB if own_head else VOCAB + VOCAB - 3)
    assert (
        core.end().bytes_read == 5 * sum(range(9, 23, 4)) * 10 * ranks
    )  # the stand-in's cache, on every rank


def test_an_error_of_a_rank_is_one_line_with_its_number(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    core, engine = opened(2)
    job = ScoreJob(ScoringPath.DECODE, scored_from=10, batch=5)
    engine.force = False
    core.begin(job, 24)
    with pytest.raises(
        AssayError, match=r"rank 0 of 2: vLLM did not run the windows as asked: .* forced token"
    ):
        core.score(WINDOWS)
    engine.force = True
    assert len(core.score(WINDOWS)) == 5  # and the engine can go on
    engine.workers[1].model_runner.model.lm_head.quant_method = object()
    engine.workers[1]._assay._head, engine.workers[1]._assay._head_checked = None, False
    monkeypatch.setattr(worker.Rank, "leave", lambda self, error: None)
    with pytest.raises(AssayError, match=r"rank 1 of 2: .* quantised or packed"):
        core.score(WINDOWS)


def test_a_rank_that_fails_in_a_step_says_why_and_ends(
    opened: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(REPORTS, str(tmp_path))
    ended: list[int] = []
    monkeypatch.setattr(worker.os, "_exit", ended.append)
    core, engine = opened(2)
    core.begin(ScoreJob(batch=2), 24)

    def full(scheduled: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    engine.workers[1].model_runner.execute_model = full
    with pytest.raises((AssayError, torch.OutOfMemoryError)):  # the stand-in's process goes on
        core.score(WINDOWS)
    assert ended[0] == 1
    report = json.loads((tmp_path / "1.json").read_text())
    assert report["memory"] and "Tried to allocate 2 GiB" in report["message"]
    deaths = object.__new__(DEATHS)
    deaths._thread, deaths._first = SimpleNamespace(join=lambda s: None), (1, 1)  # type: ignore[attr-defined]
    error = deaths.error(RuntimeError("cancelled"), core.spec)
    assert error.message.startswith(
        "rank 1 of 2 of vLLM ended while it scored: OutOfMemoryError: CUDA out of"
    )
    assert "batch" in error.remedy
    (tmp_path / "1.json").unlink()
    deaths._first = (0, -9)  # type: ignore[attr-defined]
    assert "rank 0 of 2 of vLLM ended while it scored: its process was killed by signal 9" in str(
        deaths.error(RuntimeError("cancelled"), core.spec).message
    )


def test_an_error_without_words_says_where_it_came_from() -> None:
    try:
        raise AssertionError
    except AssertionError as error:
        said = head.words_of(error)
    assert (
        said.startswith("AssertionError: in test_an_error_without_words")
        and "test_vllm_ranks.py:" in said
    )
    assert head.words_of(ValueError("no room")) == "ValueError: no room"


def test_a_replicated_head_is_shared_evenly() -> None:
    model = ToyModel()
    parts = [output_head(model, Place(rank, rank, 3)).weight for rank in range(3)]
    assert torch.equal(torch.cat(parts), model.lm_head.weight[:VOCAB])


def test_a_rank_reads_its_rows_of_a_file_alone(tmp_path: Path) -> None:
    head = Head(torch.randn(11, 4), torch.randn(11), softcap=2.0)
    file = HeadFile.of(head, tmp_path, 0)
    cpu = torch.device("cpu")
    parts = [file.rows(lo, lo + 4, cpu) for lo in (0, 4, 8, 12)]
    assert [p.vocab_size for p in parts] == [4, 4, 3, 0] and parts[0].softcap == 2.0
    assert torch.equal(torch.cat([p.weight for p in parts]), head.weight)
    head.file = tmp_path / "head-0.safetensors"
    assert HeadFile.of(head, tmp_path / "elsewhere", 1).path == str(head.file)


def test_ranks_of_unequal_memory_are_told() -> None:
    ranks: list[dict[str, Any]] = [
        {"rank": i, "memory": m * 2**30} for i, m in enumerate((80, 80, 40))
    ]
    assert "rank 2 has 40.0 GiB of GPU memory, rank 0 80.0" in unequal(ranks)
    assert unequal(ranks[:2]) == unequal([{"rank": 0}, {"rank": 1}]) == ""


def test_a_layer_fires_once_however_many_ranks_have_it() -> None:
    from assay.engines.scoring import Engagement

    both = [Engagement(6, None, {0: 3, 1: 3}), Engagement(6, None, {0: 3, 1: 3}), None]
    assert merged(both).fires == 6
    stages = [Engagement(3, None, {0: 3}), Engagement(3, None, {1: 3})]
    assert merged(stages).per_layer == {0: 3, 1: 3}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("tensor_parallel=3", "4 attention heads cannot be shared evenly by 3 ranks"),
        ("tensor_parallel=8", "4 attention heads cannot be shared evenly by 8 ranks"),
        ("tensor_parallel=4", "2 KV heads for 4 ranks: ranks would hold copies"),
        ("pipeline_parallel=5", "3 layers are fewer than 5 pipeline stages"),
    ],
)
def test_what_heads_and_layers_do_not_divide_is_refused_before_vllm_starts(
    options: str, said: str, tmp_path: Path
) -> None:
    config = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    with pytest.raises(UsageError, match=said) as caught:
        parse_vllm(f"vllm:{tmp_path}?{options}")
    assert "\n" not in caught.value.message
    assert parse_vllm(f"vllm:{tmp_path}?tensor_parallel=2&pipeline_parallel=3").ranks == 6
    for odd in (
        [1],
        {"text_config": [1]},
        {"num_attention_heads": "8", "num_key_value_heads": [1], "num_hidden_layers": "3"},
    ):
        (tmp_path / "config.json").write_text(json.dumps(odd))  # vLLM says what is wrong with it
        assert parse_vllm(f"vllm:{tmp_path}?{options}").ranks > 1
