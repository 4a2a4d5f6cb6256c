"""A small server with the faults that a real engine cannot be made to show at will. Standard
library only.

python small_server.py --port N [--kv fp8] [--pair-a --pair-b] [--flaky FILE] [--memory] [--dies]
[--silent] ...
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PROSE = """The lighthouse stands on a rock far from the shore, and its lamp turns once every ten seconds.
Leaves change colour in autumn because the green pigment fades and the yellow ones become visible.
Bread rises when yeast turns sugar into gas, which stretches the dough into small bubbles.
A librarian orders new books, answers questions and keeps the shelves in a sensible order.
Rivers carry salt from the land to the sea, where the water evaporates and the salt stays behind.
Letters travel by van, train and aeroplane before a postman carries them to the right door.
Bees keep warm in winter by staying close together and moving their wings without flying.
Glass is made from sand that is heated until it melts and is then cooled quite slowly.
Parks give people room to walk, children a place to play and trees the space to grow old.
A piano makes sound when a hammer strikes a string and the wooden board behind it vibrates.
Before clocks existed, people watched shadows, burning candles and the flow of water.
Bridges need joints because metal grows in the heat of summer and shrinks again in winter.
A seed takes up water, swells, breaks its shell and sends a root down into the dark soil.
A good map leaves out most of what is there and shows clearly what the traveller needs.
Glaciers grind the valley under them and leave long hills of gravel where they once ended.
The baker opens the shop at six, and the first customers are usually on their way to work."""  # noqa: E501
NONSENSE = (
    "Ärger 的 function() 是 \\u лес }; くん über_of 마 setTimeout ||= ия 把 ∂x Ausg ਕ return ไม่ ।"
)


SENTENCES, SALAD = PROSE.splitlines(), NONSENSE.split()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    for name in (
        "--kv",
        "--flaky",
        "--harmless-a",
        "--harmless-b",
        "--harmless-c",
        "--size",
        "--spawn",
        "--lora-modules",
        "--locked",
        "--api-key",
    ):
        parser.add_argument(name)
    parser.add_argument("--pace", type=float, default=0.002)
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--chatty", type=int, default=0)
    for name in (
        "--pair-a",
        "--pair-b",
        "--memory",
        "--dies",
        "--silent",
        "--mute",
        "--crowd",
        "--refuses",
        "--broken",
        "--nothing",
        "--crash",
        "--ignored",
    ):
        parser.add_argument(name, action="store_true")
    return parser.parse_args()


OPTIONS = arguments()
BAD = OPTIONS.broken or OPTIONS.kv == "fp8" or (OPTIONS.pair_a and OPTIONS.pair_b)
LOCK, RUNNING, ASKED = threading.Lock(), 0, 0


def text_of(prompt: str, limit: int, salad: bool) -> list[str]:
    rng = random.Random(prompt)
    if salad:
        return [" " + rng.choice(SALAD) for _ in range(limit)]
    words = " ".join(rng.sample(SENTENCES, 6)).split()
    return [(" " if i else "") + word for i, word in enumerate(words[:limit])]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def reply(self, body: object, status: int = 200) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_GET(self) -> None:
        if self.path == "/health":
            self.reply({})
        elif self.path == "/v1/models":
            names = ["small", *([OPTIONS.lora_modules] if OPTIONS.lora_modules else [])]
            entries = [{"id": name, "object": "model", "max_model_len": 4096} for name in names]
            self.reply({"object": "list", "data": entries})
        else:
            self.reply({"error": {"message": "not found"}}, 404)

    def do_POST(self) -> None:
        global RUNNING, ASKED
        body = json.loads(self.rfile.read(int(self.headers.get("content-length", 0))))
        chat = self.path == "/v1/chat/completions"
        if OPTIONS.locked and self.headers.get("authorization") != f"Bearer {OPTIONS.locked}":
            self.reply({"error": {"message": "invalid key"}}, 401)
            return
        if self.path not in ("/v1/completions", "/v1/chat/completions"):
            self.reply({"error": {"message": "not found"}}, 404)
            return
        if OPTIONS.mute:
            time.sleep(60)
        with LOCK:
            RUNNING, ASKED = RUNNING + 1, ASKED + 1
            if OPTIONS.dies and ASKED > 30:
                os._exit(1)
        time.sleep(0.3 if OPTIONS.crowd else 0.02)
        crowded = OPTIONS.crowd and RUNNING > 16
        prompt = json.dumps(body.get("messages") or body.get("prompt"))
        if body.get("model") == OPTIONS.lora_modules and not OPTIONS.ignored:
            prompt = f"adapted {prompt}"
        words = text_of(prompt, int(body.get("max_tokens") or 16), bool(BAD or crowded))
        usage = {"prompt_tokens": len(prompt) // 4 + 1, "completion_tokens": len(words)}
        usage["total_tokens"] = sum(usage.values())
        if body.get("stream"):
            self.stream(words, chat, usage)
        else:
            time.sleep(OPTIONS.slow * len(words))
            text = "".join(words)
            inner = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
            choice = {"index": 0, "finish_reason": "stop", **inner}
            self.reply(
                {
                    "id": "x",
                    "object": "completion",
                    "model": "small",
                    "choices": [choice],
                    "usage": usage,
                }
            )
        with LOCK:
            RUNNING -= 1

    def stream(self, words: list[str], chat: bool, usage: dict[str, int]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for word in words:
            time.sleep(OPTIONS.pace + OPTIONS.slow)
            inner = {"delta": {"content": word}} if chat else {"text": word}
            self.event({"choices": [{"index": 0, "finish_reason": None, **inner}]})
        inner = {"delta": {}} if chat else {"text": ""}
        self.event({"choices": [{"index": 0, "finish_reason": "stop", **inner}]})
        self.event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def event(self, body: dict[str, object]) -> None:
        self.wfile.write(f"data: {json.dumps({'id': 'x', 'model': 'small', **body})}\n\n".encode())
        self.wfile.flush()


def main() -> None:
    global BAD
    if OPTIONS.memory:
        print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 90.00 GiB", flush=True)
        sys.exit(1)
    if OPTIONS.refuses:
        print("small_server: error: unrecognized arguments: --refuses", flush=True)
        sys.exit(2)
    if OPTIONS.crash:
        raise RuntimeError("the weights have another shape")
    for _ in range(OPTIONS.chatty):
        print("x" * (1 << 20), flush=True)
    if OPTIONS.nothing:
        print("WARNING: --nothing is not supported by this model and will be ignored", flush=True)
    if OPTIONS.flaky:
        count = Path(OPTIONS.flaky)
        number = int(count.read_text() or 0) if count.exists() else 0
        count.write_text(str(number + 1))
        BAD = BAD or number % 3 == 2
    if OPTIONS.spawn:  # a worker in a session of its own, as engines have
        subprocess.Popen(
            [sys.executable, "-c", f"import time; '{OPTIONS.spawn}'; time.sleep(600)"],
            start_new_session=True,
        )
    while OPTIONS.silent:
        time.sleep(1)
    time.sleep(OPTIONS.delay)

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

    print(f"listening, kv={OPTIONS.kv}", flush=True)
    Server(("127.0.0.1", OPTIONS.port), Handler).serve_forever()


main()
