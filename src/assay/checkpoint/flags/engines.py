"""Recognise the command of another engine than vLLM."""

from __future__ import annotations

import re
import shlex

_MARKS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("SGLang", re.compile(r"sglang(\.\w+)*|sglang serve")),
    ("llama.cpp", re.compile(r"(.*/)?llama-(server|cli|run)(\.exe)?|(.*/)?server\.cpp")),
    ("llama-cpp-python", re.compile(r"llama_cpp\.server")),
    ("TensorRT-LLM", re.compile(r"(.*/)?trtllm-(serve|bench)|tensorrt_llm(\.\w+)*")),
    ("text-generation-inference", re.compile(r"(.*/)?text-generation-(launcher|server|router)")),
    ("LMDeploy", re.compile(r"(.*/)?lmdeploy")),
    ("Ollama", re.compile(r"(.*/)?ollama")),
    ("MLX", re.compile(r"mlx_(lm|vlm)(\.\w+)*")),
    ("TabbyAPI", re.compile(r"tabbyapi(\.\w+)*")),
    ("Aphrodite", re.compile(r"(.*/)?aphrodite(\.\w+)*")),
    ("mistral.rs", re.compile(r"(.*/)?mistralrs(-server)?")),
    ("KTransformers", re.compile(r"(.*/)?ktransformers(\.\w+)*")),
)
_LAUNCHERS = re.compile(r"(.*/)?(python[\d.]*|uv|uvx|run|nohup|exec|sudo|env|docker|-m)")
_FIRST_WORDS = 6


def other_engine(command: str) -> str | None:
    """The engine whose command this is, None for vLLM's and for bare options."""
    try:
        words = shlex.split(command)
    except ValueError:
        return None
    for word in words[:_FIRST_WORDS]:
        if word == "vllm" or word.startswith("vllm."):
            return None
        for name, mark in _MARKS:
            if mark.fullmatch(word):
                return name
        if not (_LAUNCHERS.fullmatch(word) or re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", word)):
            return None
    return None
