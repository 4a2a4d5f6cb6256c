"""Starts on a Ray cluster: a worker launches a configuration on its node and asks it there.

The doctor decides and keeps what was measured, as it does without Ray; a worker gives one start at
a time. Workers find the doctor's function by import path.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from assay.engines.ray_scorer import Actor, Needs, Pool
from assay.engines.ray_worker import Opened, Refusal, Worker, _answer, _function, model_files
from assay.environment import describe, measured_on
from assay.errors import AssayError, UsageError
from assay.progress import Progress

_START = "assay.serving.doctor:remote_start"
_READ = frozenset(
    {".py", ".sh", ".json", ".jinja", ".gguf", ".safetensors", ".yaml", ".yml", ".toml"}
)
"""Suffixes of files that a command reads; another file that it names may be one that it writes."""
_ENGINES = ("vllm", "torch", "transformers", "sglang", "llama_cpp_python")
_OF_ENGINES = re.compile(r"(VLLM|HF|TORCH|TRITON|CUDA|NCCL|GGML|LLAMA|OMP|MKL)_(?!VISIBLE_DEVICES)")
_PARALLEL = re.compile(r"--?(?:(?:tensor|pipeline|data)-parallel-size|tp|pp|dp|tp-size)[ =](\d+)")


class StartWorker(Worker):
    """A process that launches servers, one at a time."""

    def __init__(self, threads: int) -> None:
        # A server takes as many threads as it would without Ray, which sets this variable in its
        # workers.
        os.environ.pop("OMP_NUM_THREADS", None)
        self._node = ""

    def hello(self) -> tuple[str, dict[str, Any]]:
        """The node, and what has to agree before anything is launched."""
        self._node, software = super().hello()
        return self._node, software

    def open(self, spec: str) -> Any:
        """Be where the command was given, with its engine's variables; what the machine and the
        command's files are.
        """

        def opened() -> tuple[dict[str, Any], dict[str, Any]]:
            asked = json.loads(spec)
            if not Path(asked["folder"]).is_dir():
                raise AssayError(
                    f"there is no folder {asked['folder']} there, in which the command was given",
                    finding_id="fidelity.other_setup",
                    remedy="run the doctor in a folder that all nodes have",
                )
            os.chdir(asked["folder"])
            os.environ.update(asked["environment"])
            os.environ["ASSAY_SUPERVISOR_APART"] = "1"
            there, gpu = describe(), gpus()
            machine = {name: there[name] for name in ("platform", "cpu", "cpu_count")}
            setup = (
                {"platform": there["platform"], "gpu": gpu} if gpu else machine
            )  # whose host does not matter
            return {"machine": setup, **of_command(asked["words"], asked["model"])}, machine | {
                "gpu": gpu
            }

        return _answer(opened)

    def run(self, spec: str, target: str, *given: Any) -> Any:
        """`target(*given)`, by import path, and the node that it ran on."""
        return _answer(lambda: (self._node, _function(target)(*given)))


def gpus() -> str | None:
    """The kinds of the node's GPUs, as the driver lists them: to ask CUDA itself would take memory
    of a GPU.
    """
    found = set()
    for file in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        found |= set(re.findall(r"Model:\s*(.+)", file.read_text(errors="replace")))
    return ", ".join(sorted(found)) or None


def of_command(words: Sequence[str], model: str | None) -> dict[str, dict[str, str]]:
    """The programs of a command, by version or digest, and the SHA-256 of the files that it reads
    on this machine.
    """
    programs, files = dict[str, str](), dict[str, str]()
    for word in words:
        if (there := shutil.which(word)) is None:
            continue
        beside = Path(there).parent.parent.glob("lib/python3*/site-packages/*.dist-info")
        versions = sorted(
            p.name.removesuffix(".dist-info")
            for p in beside
            if p.name.partition("-")[0] in _ENGINES
        )
        with Path(there).open("rb") as file:
            script = file.read(2) == b"#!"
        programs[word] = ", ".join(versions) or ("script" if script else _digest_of(there))
    named = [name for word in words for name in re.findall(r"[^\s\"',={}\[\]]+", word)]
    for name in dict.fromkeys([*named, *([model] if model else [])]):
        path = Path(name).expanduser()
        if (
            name == model
            or (path.is_file() and path.suffix in _READ)
            or (path / "config.json").is_file()
        ):
            files |= {
                f"{name}: {file}": digest for file, digest in model_files(f"file:{name}").items()
            }
    return {"programs": programs, "files": files}


def _digest_of(path: str) -> str:
    return model_files(f"file:{path}").get(Path(path).name, "")


class RayStarts(Pool):
    """Workers of a doctor: one on each node, or one for as many GPUs as the command takes."""

    KIND = StartWorker
    AT_ONCE = 1
    AGAIN = "its start is repeated", "their starts were repeated"
    LEANER = ": without a GPU a start has a node to itself"
    TOO_MUCH = "start", ""

    def __init__(
        self, address: str, workers: int, progress: Progress, command: Any, key_env: str | None
    ) -> None:
        super().__init__(address, workers, progress)
        everything = [setting.name for setting in command.settings]
        if "CUDA_VISIBLE_DEVICES" in command.variables(everything):
            raise UsageError(
                "Ray chooses the GPUs of a start",
                remedy="leave CUDA_VISIBLE_DEVICES out of the command",
            )
        words: list[str] = command.words(everything, "PORT")
        own = {
            name: value
            for name, value in os.environ.items()
            if name == key_env or _OF_ENGINES.match(name)
        }
        about = {
            "folder": str(Path.cwd()),
            "words": words,
            "model": command.model,
            "environment": own,
        }
        self._words, self._model = words, command.model
        self.spec = json.dumps(about)

    def __enter__(self) -> RayStarts:
        super().__enter__()
        try:
            self._staff(self._needs_of(self.spec))
            self._agree(f"{self.spec} files", "this machine", of_command(self._words, self._model))
            self.each(self.spec)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _needs_of(self, spec: str) -> Needs:
        resources = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        if any(found.get("GPU") for found in resources):
            gpus = 1
            for size in _PARALLEL.findall(" ".join(self._words)):
                gpus *= int(size)
            return Needs(1, 1, gpus)
        cpus = max(1, *(int(found.get("CPU", 0)) for found in resources))
        return Needs(cpus, cpus, 0)

    def _name(self, spec: str) -> str:
        return self._words[0].rpartition("/")[2]

    def _admit(self, actor: Actor, spec: str, opened: Any) -> Opened:
        if isinstance(opened, Refusal):
            raise opened.error(f"{actor.node}: ")
        setup, environment = opened
        self._agree(f"{spec} files", actor.node, setup)
        self._agree(spec, actor.node, setup)
        actor.opened.add(spec)
        measured_on(environment)
        return opened  # type: ignore[no-any-return]

    def starts(self, asked: Sequence[Any]) -> Iterator[Any]:
        """What each start showed, in their order. AssayError where one was lost too often, or
        servers differ.
        """
        units = [lambda one=one: ("run", (_START, one)) for one in asked]
        for node, answered in self.map(self.spec, units):
            if answered.version:
                self._agree(f"{self.spec} engine", node, {"engine": answered.version})
            yield answered
