"""RayStarts of the doctor on a real Ray cluster of two nodes on this machine: the same report, and
what gets lost on the way.
"""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("ray")
from assay.errors import AssayError, UsageError
from assay.options import DoctorOptions
from assay.progress import NO_PROGRESS, Progress
from assay.serving.command import read_command
from assay.serving.ray_starts import RayStarts, of_command
from assay.serving.remote import StartAnswer
from assay.serving.run import run_doctor
from assay.serving.search import VARYING, Bench, Rates, Tally
from assay.serving.symptoms import Observation
from assay.verdict import Report
from engines.test_ray import Cluster, cluster, wait_for_nodes  # noqa: F401
from serving.asking import SERVER, marked


def diagnose(
    *words: str, progress: Progress = NO_PROGRESS, template: str = SERVER, **options: Any
) -> Report:
    short = {"seconds": 5.0, "budget": 4.0, "fault_rate": 1.0, "ladder": False, "tools": False}
    return run_doctor(
        words, DoctorOptions(command_template=template, **{**short, **options}), progress
    )


def findings(report: Report) -> Any:
    """What the doctor says, without clocks: which starts of a configuration ran first, and how many
    ran ahead of a decision, is the cluster's affair.
    """
    found = report.results
    starts = {(tuple(s["settings"]), s["state"], s["resumed"]) for s in found["starts"]}
    return (
        report.exit_code,
        found["guilty_sets"],
        [(s["name"], s["role"]) for s in found["settings"]],
        starts,
    )


class Lines:
    """Progress that keeps the lines, and does something at the first that holds a text."""

    def __init__(self, text: str = "", act: Callable[[], None] | None = None) -> None:
        self.lines, self._text, self._act = list[str](), text, act

    @contextmanager
    def __call__(self, what: str, steps: int) -> Iterator[Callable[[], None]]:
        self.lines.append(what)
        if self._act and self._text in what:
            act, self._act = self._act, None
            act()
        yield lambda: None


def two_nodes(cluster: Cluster) -> None:  # noqa: F811
    if len(cluster._nodes) < 2:
        cluster.start()
    wait_for_nodes(cluster, 2)


def workers() -> list[int]:
    return marked("ray::StartWorker")


def gone(found: Callable[[], list[int]]) -> bool:
    until = time.monotonic() + 60
    while found() and time.monotonic() < until:
        time.sleep(0.1)
    return not found()


def test_as_many_starts_are_ahead_as_a_decision_needs_whatever_they_show() -> None:
    def steps(rates: Rates, tally: Tally) -> int:
        return Bench(lambda *of: "good", rates)._surely(tally)

    assert steps(Rates(), Tally()) == 1
    varying = Rates(dict(VARYING))
    for tally in (Tally(), Tally(good=1), Tally(bad=1, good=3), Tally(cannot=1), Tally(unclear=2)):
        count = steps(varying, tally)
        shorter = range(1, count)
        both = [
            varying.decide(tally.bad + b, tally.good + n - b) for n in shorter for b in range(n + 1)
        ]
        assert set(both) <= {"undecided"}
    assert steps(varying, Tally(unclear=2)) == 1


def test_what_a_start_showed_survives_the_way_back() -> None:
    from assay.verdict import Finding, Severity, Verdict

    seen = Observation(facts={"kind": "vllm", "version": "0.32.0"})
    notice = Finding("server.x", Severity.INFO, "said")
    sent = StartAnswer(
        seen, [Report("compare", Verdict.PASS, {}, findings=[notice])], True, [notice]
    )
    back = pickle.loads(pickle.dumps(sent))
    assert back == sent and back.version == "vllm 0.32.0"
    assert StartAnswer(None, [], False, []).version == ""


def test_what_a_command_reads_is_told_from_what_it_writes(tmp_path: Path) -> None:
    script, log, model = tmp_path / "serve.py", tmp_path / "out.log", tmp_path / "model"
    model.mkdir()
    for file in (script, log, model / "config.json"):
        file.write_text("{}")
    found = of_command(
        ["python3", str(script), "--log", str(log), f'--spec={{"model": "{model}"}}'], None
    )
    assert sorted(found["files"]) == [f"{model}: config.json", f"{script}: serve.py"]
    assert found["programs"]["python3"]
    with pytest.raises(UsageError, match="Ray chooses the GPUs"):
        command = read_command(["CUDA_VISIBLE_DEVICES=1", "vllm", "serve", "m"])
        RayStarts("local", 0, NO_PROGRESS, command, None)


@pytest.mark.engine
def test_the_report_is_the_same_and_starts_that_are_needed_run_at_the_same_time(
    cluster: Cluster,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two_nodes(cluster)
    for words, more in (
        (("--harmless-a", "1"), {"fault_rate": 0.7}),
        (("--harmless-a", "1", "--kv", "fp8"), {}),
    ):
        found, lines = [], Lines()
        for where in ("", cluster.address):
            monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / f"{len(words)} {where}"))
            report = diagnose(*words, progress=lines, ray=where, **more)
            found.append(findings(report))
        assert found[0] == found[1]
        assert report.environment["cluster"]["workers"] == 2
        # Three good starts of the given command are needed: the second and the third ran together.
        assert any("starts 2 to 3: at the same time" in line for line in lines.lines) == (
            "fault_rate" in more
        )
    assert found[0][:2] == (1, [["--kv"]])


@pytest.mark.engine
def test_a_lost_worker_takes_its_server_along_and_its_start_is_repeated(cluster: Cluster) -> None:  # noqa: F811
    two_nodes(cluster)
    mark = f"mark-{os.getpid()}-lost"
    seen: list[int] = []

    def kill() -> None:
        def later() -> None:
            while (
                len(marked(mark)) < 4
            ):  # two processes that supervise, the server, and what it started
                time.sleep(0.05)
            seen.extend(marked(mark))
            parents = {
                int((Path("/proc") / str(p) / "stat").read_text().rpartition(")")[2].split()[1])
                for p in seen
            }
            for pid in parents & set(workers()):
                os.kill(pid, signal.SIGKILL)

        threading.Thread(target=later, daemon=True).start()

    lines = Lines("baseline, start 1: starting", kill)
    template = f"{SERVER} --spawn {mark} --delay 1"
    report = diagnose("--harmless-a", "1", progress=lines, template=template, ray=cluster.address)
    assert report.exit_code == 0 and report.environment["cluster"]["lost"] == 1
    assert [s["resumed"] for s in report.results["starts"]] == [False, False]
    assert "fidelity.worker_lost" in {f.id for f in report.findings}
    assert any(
        line.startswith("lost a worker on node ") and "its start is repeated" in line
        for line in lines.lines
    )
    assert (
        len(seen) >= 4
        and gone(lambda: [p for p in marked(mark) if p in seen])
        and gone(lambda: marked(mark))
    )


@pytest.mark.engine
def test_an_interrupted_doctor_goes_on_without_ray_and_leaves_nothing(cluster: Cluster) -> None:  # noqa: F811
    two_nodes(cluster)
    mark = f"mark-{os.getpid()}-interrupted"
    template = f"{SERVER} --spawn {mark} --delay 1"

    def interrupt() -> None:
        def later() -> None:
            until = time.monotonic() + 3  # the start takes five seconds at least
            while len(marked(mark)) < 4 and time.monotonic() < until:
                time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGINT)

        threading.Thread(target=later, daemon=True).start()

    lines = Lines("given command, start 1: starting", interrupt)
    first = diagnose("--harmless-a", "1", progress=lines, template=template, ray=cluster.address)
    assert first.interrupted and first.results["launches"] == 1
    assert gone(lambda: marked(mark)) and gone(workers)
    second = diagnose("--harmless-a", "1", template=template)
    assert second.exit_code == 0 and [s["resumed"] for s in second.results["starts"]] == [
        True,
        False,
    ]


@pytest.mark.engine
def test_a_node_with_another_version_of_a_file_is_refused_by_name(
    cluster: Cluster,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    two_nodes(cluster)
    monkeypatch.setattr(
        "assay.serving.ray_starts.of_command",
        lambda *of: {"programs": {"python": "1"}, "files": {}},
    )
    with pytest.raises(
        AssayError, match=r"node \S+ \(\w{8}\) has another set-up than this machine"
    ) as error:
        diagnose("--harmless-a", "1", ray=cluster.address)
    assert error.value.finding_id == "fidelity.other_setup" and gone(workers)
