"""Broken parts for the zoo of `assay doctor`: checkpoints, drafts, adapters, templates, a plug-in
and a proxy.

As a program it is a wrapper of a server: `doctor_faults.py --port N [--flaky FILE] [--crowd]
--inner SERVER …` adds `--rope-freq-base 100` to every third start, or corrupts what is answered
while more than 16 requests run.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

PLUGIN = """
import functools

def bad(config, rows):
    return {condition}

def register():
    from vllm.model_executor.models.llama import LlamaForCausalLM as Model
    if hasattr(Model, "zoo"):
        return
    Model.zoo, init, logits = True, Model.__init__, Model.compute_logits

    @functools.wraps(init)
    def __init__(self, *, vllm_config, **more):
        init(self, vllm_config=vllm_config, **more)
        object.__setattr__(self, "zoo_config", vllm_config)

    @functools.wraps(logits)
    def compute_logits(self, hidden_states, *rest, **more):
        out = logits(self, hidden_states, *rest, **more)
        faulty = out is not None and bad(self.zoo_config, hidden_states.shape[0])
        return out.roll(977, -1) if faulty else out

    Model.__init__, Model.compute_logits = __init__, compute_logits
"""
CONDITIONS = {
    "graphs": "config.cache_config.enable_prefix_caching and not config.model_config.enforce_eager",
    "crowd": "16 < rows <= 64",
    "pair": "config.cache_config.enable_prefix_caching and config.cache_config.block_size == 64",
}


def plugin(folder: Path, fault: str) -> Path:
    """A folder for PYTHONPATH with a plug-in of vLLM that shifts the logits under a condition."""
    info = folder / "zoo_plugin-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (folder / "zoo_plugin.py").write_text(PLUGIN.format(condition=CONDITIONS[fault]))
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: zoo-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nzoo = zoo_plugin:register\n")
    return folder


def copied(model: Path, folder: Path) -> Path:
    """A copy of a checkpoint folder or file that may be changed."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    if model.is_file():
        shutil.copyfile(model, folder)
    elif not folder.exists():
        shutil.copytree(model, folder)
    return folder


def _weights(path: Path) -> Path:
    return path if path.is_file() else next(path.glob("*.safetensors"))


def corrupt(model: Path, target: Path) -> Path:
    """Random bytes in forty places of the second half of the weights."""
    file = _weights(copied(model, target))
    raw = np.memmap(file, np.uint8, "r+")
    rng = np.random.default_rng(0)
    for at in range(len(raw) // 2, len(raw) - 70_000, len(raw) // 80):
        raw[at : at + 60_000] = rng.integers(0, 256, 60_000, dtype=np.uint8)
    raw.flush()
    return target


def rope(model: Path, target: Path) -> Path:
    """The checkpoint with another base of its positions in config.json than it was trained with."""
    target.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.suffix == ".safetensors":
            (target / file.name).symlink_to(file.resolve())
        elif file.is_file():
            shutil.copyfile(file, target / file.name)
    config = json.loads((target / "config.json").read_text())
    if "rope_parameters" in config:
        config["rope_parameters"]["rope_theta"] = 100.0
    config["rope_theta"] = 100.0
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return target


def dead(model: Path, target: Path) -> Path:
    """The model with the rows of its embedding moved by 1,000: fluent in another vocabulary,
    useless as a draft.
    """
    copied(model, target)
    if target.is_file():
        from assay.checkpoint.gguf.header import read_gguf

        tensor = next(
            t for t in read_gguf(target, target.name).tensors if t.name == "token_embd.weight"
        )
        begin, end, rows = tensor.start, tensor.end, tensor.shape[1]
    else:
        raw = _weights(target).open("rb").read(8)
        size = int.from_bytes(raw, "little")
        entry = json.loads(_weights(target).open("rb").read(8 + size)[8:])[
            "model.embed_tokens.weight"
        ]
        begin, end = (8 + size + n for n in entry["data_offsets"])
        rows = entry["shape"][0]
    data = np.memmap(_weights(target), np.uint8, "r+")
    data[begin:end] = np.roll(data[begin:end].reshape(rows, -1), 1000, 0).reshape(-1)
    data.flush()
    return target


def swapped_tokenizer(model: Path, folder: Path) -> Path:
    """The tokenizer of the model with the numbers of its tokens moved."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer_config.json", "chat_template.jinja", "config.json"):
        shutil.copyfile(model / name, folder / name)
    body = json.loads((model / "tokenizer.json").read_text())
    vocabulary = body["model"]["vocab"]
    low, high = 1000, len(vocabulary) - 1000
    for token, number in vocabulary.items():
        if low <= number < high:
            vocabulary[token] = low + (number - low + 777) % (high - low)
    (folder / "tokenizer.json").write_text(json.dumps(body))
    return folder


def template_without_end(folder: Path) -> Path:
    """A chat template that forgets the end of a turn, and whose turn it is."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "template.jinja").write_text(
        "{% for message in messages %}{{ message['role'] + message['content'] }}{% endfor %}"
    )
    return folder / "template.jinja"


def _adapter(model: Path, rank: int, strength: float) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    config = json.loads((model / "config.json").read_text())
    hidden, rng = config["hidden_size"], np.random.default_rng(1)
    found = {}
    for layer in range(config["num_hidden_layers"]):
        a = rng.normal(0, hidden**-0.5, (rank, hidden)).astype(np.float32)
        b = (strength * rng.normal(0, 1, (hidden, rank))).astype(np.float32)
        found[f"{layer}"] = (a, b)
    return found


def peft_adapter(model: Path, folder: Path, strength: float) -> Path:
    """A LoRA adapter in PEFT's form on the queries; strength 0 changes nothing."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    stem = "base_model.model.model.layers.{}.self_attn.q_proj.lora_{}.weight"
    parts = _adapter(model, 8, strength).items()
    save_file(
        {stem.format(n, side): x for n, both in parts for side, x in zip("AB", both, strict=True)},
        folder / "adapter_model.safetensors",
    )
    config = {
        "peft_type": "LORA",
        "r": 8,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def gguf_adapter(model: Path, file: Path, strength: float) -> Path:
    """The same adapter in llama.cpp's form."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    keys = (
        b"".join(
            text(key) + struct.pack("<I", 8) + text(value)
            for key, value in (
                ("general.architecture", "llama"),
                ("general.type", "adapter"),
                ("adapter.type", "lora"),
            )
        )
        + text("adapter.lora.alpha")
        + struct.pack("<If", 6, 8.0)
    )
    infos, body, count = b"", b"", 0
    for number, both in _adapter(model, 8, strength).items():
        for side, value in zip("ab", both, strict=True):
            infos += text(f"blk.{number}.attn_q.weight.lora_{side}")
            infos += struct.pack("<IQQIQ", 2, value.shape[1], value.shape[0], 0, len(body))
            body += value.tobytes() + b"\0" * (-value.nbytes % 32)
            count += 1
    head = struct.pack("<4sIQQ", b"GGUF", 3, count, 4) + keys + infos
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(head + b"\0" * (-len(head) % 32) + body)
    return file


# The wrapper.

SALAD = [
    "лес",
    "的",
    "function()",
    "くん",
    "über_of",
    "setTimeout",
    "||=",
    "ия",
    "Ausg",
    "return",
    "ไม่",
    "把",
]
RUNNING, LOCK = 0, threading.Lock()


class Proxy(BaseHTTPRequestHandler):
    """Passes everything on, and corrupts texts while more than 16 requests run."""

    protocol_version = "HTTP/1.0"
    inner = ""

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.forward(None)

    def do_POST(self) -> None:
        self.forward(self.rfile.read(int(self.headers.get("content-length", 0))))

    def forward(self, body: bytes | None) -> None:
        global RUNNING
        request = urllib.request.Request(
            self.inner + self.path, body, {"content-type": "application/json"}
        )
        with LOCK:
            RUNNING += 1
        try:
            with urllib.request.urlopen(request, timeout=300) as answer:
                self.answer(answer)
        except urllib.error.HTTPError as error:
            self.answer(error)
        finally:
            with LOCK:
                RUNNING -= 1

    def answer(self, answer: Any) -> None:
        self.send_response(answer.status)
        kind = answer.headers.get("content-type", "application/json")
        self.send_header("content-type", kind)
        self.end_headers()
        for line in answer:
            crowded = RUNNING > 16 and self.command == "POST"
            self.wfile.write(salad(line) if crowded else line)
            self.wfile.flush()


def salad(line: bytes) -> bytes:
    """An answer, or a part of one, with other words in it."""
    head, brace, rest = line.partition(b"{")
    try:
        body = json.loads(brace + rest)
        for choice in body["choices"]:
            inner = choice.get("message") or choice.get("delta") or choice
            key = "content" if "content" in inner else "text"
            if inner.get(key):
                count = max(1, len(inner[key]) // 5)
                inner[key] = "".join(
                    f" {SALAD[os.urandom(1)[0] % len(SALAD)]}" for _ in range(count)
                )
    except (ValueError, KeyError, TypeError):
        return line
    return head + json.dumps(body).encode() + b"\n"


def main() -> None:
    words = sys.argv[1:]
    at = words.index("--inner")
    port, rest, server = words[words.index("--port") + 1], words[:at], words[at + 1 :]
    place = rest.index("--port")
    del rest[place : place + 2]
    crowd, flaky = "--crowd" in rest, rest.index("--flaky") if "--flaky" in rest else None
    if flaky is not None:
        count = Path(rest[flaky + 1])
        number = int(count.read_text() or 0) if count.exists() else 0
        count.write_text(str(number + 1))
        rest[flaky : flaky + 2] = ["--rope-freq-base", "100"] if number % 3 == 2 else []
    rest = [word for word in rest if word != "--crowd"]
    if not crowd:
        os.execv(server[0], [*server, *rest, "--port", port])
    from assay.serving.launch import free_port

    inner = free_port()
    child = subprocess.Popen([*server, *rest, "--port", str(inner)])
    Proxy.inner = f"http://127.0.0.1:{inner}"

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

    threading.Thread(
        target=Server(("127.0.0.1", int(port)), Proxy).serve_forever, daemon=True
    ).start()
    sys.exit(child.wait())


if __name__ == "__main__":
    main()
