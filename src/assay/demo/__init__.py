"""Real models, real servers and damage to them: for the demo, the tests and the benchmarks."""

from assay.demo.once import build_once, locked
from assay.demo.pip import run_pip
from assay.demo.servers import Server, llama_server, transformers_server, vllm_server
from assay.demo.vllm_environment import VERSION, vllm_python

__all__ = [
    "VERSION",
    "Server",
    "build_once",
    "llama_server",
    "locked",
    "run_pip",
    "transformers_server",
    "vllm_python",
    "vllm_server",
]
