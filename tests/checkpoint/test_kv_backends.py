"""--kv-cache-dtype against backends and GPUs, and the table against vLLM's own classes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from assay.checkpoint.declared import Declared
from assay.checkpoint.flags import command as arguments
from assay.checkpoint.flags.kv_backends import BACKENDS, KV_DTYPES, OTHER_NAMES, chosen
from assay.checkpoint.flags.kv_dtype import choice, lint_kv
from assay.checkpoint.kv_cache import KvCache
from assay.checkpoint.subject import Checkpoint
from assay.verdict import Finding

NONE = KvCache(None, False, frozenset())


def lint(
    flags: str,
    capability: float | None = None,
    method: str | None = None,
    cache: KvCache = NONE,
    **config: int,
) -> list[Finding]:
    import json

    settings = {"hidden_size": 1024, "num_attention_heads": 8} | config
    text = json.dumps(settings).encode()
    checkpoint = Checkpoint("folder", {"config.json": len(text)}, lambda name: text)
    declared = Declared(method, "config.json", {}, lambda module: None) if method else None
    return list(lint_kv(checkpoint, declared, cache, choice(arguments.parse(flags), capability)))


def said(findings: list[Finding]) -> set[tuple[str, str]]:
    return {(f.id.removeprefix("checkpoint."), f.severity.value) for f in findings}


ERROR, WARNING = ("kv_dtype_conflict", "error"), ("kv_dtype_conflict", "warning")


@pytest.mark.parametrize(
    ("flags", "capability", "expected"),
    [
        ("", 8.6, set()),
        ("--kv-cache-dtype auto --attention-backend TRITON_ATTN", 8.6, set()),
        ("--kv-cache-dtype fp8_e5m2", 8.6, set()),  # FlashInfer takes it
        ("--kv-cache-dtype fp8", 8.6, {WARNING}),
        ("--kv-cache-dtype fp8 --attention-backend FLASH_ATTN", 8.6, {ERROR, WARNING}),
        ("--kv-cache-dtype fp8 --attention-backend FLASH_ATTN", 9.0, {WARNING}),
        ("--kv-cache-dtype fp8 --attention-backend FLASH_ATTN", 12.0, {ERROR, WARNING}),
        ("--kv-cache-dtype fp8_e5m2 --attention-backend flash_attn", None, {ERROR}),
        ("--kv-cache-dtype fp8 --attention-backend TRITON_ATTN", 8.6, {ERROR, WARNING}),
        ("--kv-cache-dtype fp8 --attention-backend TRITON_ATTN", 8.9, {WARNING}),
        ("--kv-cache-dtype fp8_e5m2 --attention-backend TRITON_ATTN", 8.9, {WARNING}),
        ("--kv-cache-dtype bfloat16 --attention-backend TRITON_ATTN", 7.5, {ERROR}),
        ("--kv-cache-dtype int8_per_token_head", 8.6, set()),
        ("--kv-cache-dtype fp8_per_token_head", 8.6, {ERROR}),
        ("--kv-cache-dtype nvfp4", 9.0, set()),
        ("--kv-cache-dtype nvfp4_4over6", 9.0, {ERROR}),
        ("--kv-cache-dtype nvfp4_4over6", 10.0, set()),
        ("--kv-cache-dtype turboquant_k8v4", 9.0, set()),
        ("--kv-cache-dtype turboquant_k8v4 --attention-backend FLASHINFER", None, {ERROR}),
        ("--kv-cache-dtype ultraquant_4bit", 9.0, {ERROR}),
        ("--kv-cache-dtype int3", None, {("flag_rejected", "error")}),
        ("--attention-backend FLASHMLA", None, {("flag_rejected", "error")}),
        ("--attention-backend FLASH_ATTENTION", None, {("flag_rejected", "error")}),
        ("--attention-config.backend HPC_ATTN", 8.0, {ERROR}),
        ("--attention-backend TRITON_MSA", None, set()),
    ],
)
def test_ordinary_attention(
    flags: str, capability: float | None, expected: set[tuple[str, str]]
) -> None:
    assert said(lint(flags, capability)) == expected


def test_a_head_that_flashinfer_does_not_take_ends_at_triton() -> None:
    flags = "--kv-cache-dtype fp8_e5m2"
    assert said(lint(flags, 8.6, head_dim=80)) == {ERROR}
    assert said(lint(flags, 8.9, head_dim=80)) == {WARNING}  # accepted, and stored as e4m3
    assert said(lint("--attention-backend FLASHINFER", head_dim=80)) == {("flag_rejected", "error")}


@pytest.mark.parametrize(
    ("flags", "capability", "expected"),
    [
        ("--kv-cache-dtype fp8_e5m2", None, {ERROR}),
        ("--kv-cache-dtype fp8", 10.0, {WARNING}),
        ("--kv-cache-dtype fp8 --attention-backend FLASH_ATTN_MLA", None, {ERROR, WARNING}),
        ("--attention-backend CUTLASS_MLA", 9.0, {ERROR}),
        ("--attention-backend FLASH_ATTN", 9.0, {("flag_rejected", "error")}),
    ],
)
def test_latent_attention(
    flags: str, capability: float | None, expected: set[tuple[str, str]]
) -> None:
    assert said(lint(flags, capability, kv_lora_rank=512)) == expected


def test_sparse_latent_attention_has_backends_of_its_own() -> None:
    sparse = {"kv_lora_rank": 512, "index_topk": 2048}
    assert said(lint("--kv-cache-dtype fp8_ds_mla", 9.0, **sparse)) == set()
    assert said(lint("--kv-cache-dtype fp8_ds_mla", 9.0, kv_lora_rank=512)) == {ERROR}
    assert said(lint("--attention-backend FLASHMLA", 9.0, **sparse)) == {("flag_rejected", "error")}


@pytest.mark.parametrize(
    ("method", "cache", "refused"),
    [
        ("fp8", NONE, True),
        ("modelopt", NONE, True),
        ("compressed-tensors", NONE, False),
        ("compressed-tensors", KvCache("fp8", False, frozenset({0})), True),
        ("gptq", NONE, False),
    ],
)
def test_e5m2_is_refused_where_the_checkpoint_may_hold_scales(
    method: str, cache: KvCache, refused: bool
) -> None:
    assert (ERROR in said(lint("--kv-cache-dtype fp8_e5m2", None, method, cache))) is refused


def test_scales_that_are_there_are_no_warning() -> None:
    assert (
        said(lint("--kv-cache-dtype fp8", 9.0, "fp8", KvCache("fp8", False, frozenset({0}))))
        == set()
    )
    assert said(
        lint("--kv-cache-dtype nvfp4", 9.0, "fp8", KvCache("fp8", False, frozenset({0})))
    ) == {ERROR}


def test_the_order_of_choice() -> None:
    assert chosen("ordinary", "auto", 9.0, 128) == "FLASH_ATTN"
    assert chosen("ordinary", "auto", 10.0, 128) == "FLASHINFER"
    assert chosen("ordinary", "auto", 7.5, 128) == "TRITON_ATTN"
    assert chosen("latent", "fp8", 9.0, None) == "FLASHMLA"
    assert chosen("sparse", "auto", 8.0, None) is None


@pytest.mark.engine
def test_vllm_itself_agrees() -> None:
    """Backends, their KV dtypes and head sizes as vLLM's classes state them (read, not imported:
    they need CUDA).
    """
    from assay.demo import vllm_python

    package = next((vllm_python().parents[1] / "lib").glob("python3*/site-packages/vllm"))
    literals = _classes(package / "config" / "cache.py", "CacheDType")
    assert literals == KV_DTYPES
    members = _members(package / "v1" / "attention" / "backends" / "registry.py")
    assert set(members) == set(BACKENDS) | OTHER_NAMES
    read = 0
    for name, backend in BACKENDS.items():
        path, _, class_name = members[name].rpartition(".")
        stated = _stated(package.parent / (path.replace(".", "/") + ".py"), class_name)
        if "dtypes" in stated:
            assert stated["dtypes"] == backend.dtypes, name
            read += 1
        if stated.get("heads") and backend.heads is not None:
            assert stated["heads"] == backend.heads, name
    assert read >= 20


def _classes(file: Path, name: str) -> set[str]:
    tree = ast.parse(file.read_text())
    node = next(
        n for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) == name
    )
    return {c.value for c in ast.walk(node.value) if isinstance(c, ast.Constant)}


def _members(file: Path) -> dict[str, str]:
    enum = next(n for n in ast.parse(file.read_text()).body
                if isinstance(n, ast.ClassDef) and n.name == "AttentionBackendEnum")  # fmt: skip
    return {
        ast.unparse(n.targets[0]): str(ast.literal_eval(n.value))
        for n in enum.body
        if isinstance(n, ast.Assign)
    }


def _stated(file: Path, class_name: str) -> dict[str, frozenset[object]]:
    body = next(n for n in ast.parse(file.read_text()).body
                if isinstance(n, ast.ClassDef) and n.name == class_name).body  # fmt: skip
    stated: dict[str, frozenset[object]] = {}
    for node in body:
        try:
            if (
                isinstance(node, ast.AnnAssign)
                and ast.unparse(node.target) == "supported_kv_cache_dtypes"
                and node.value
            ):
                stated["dtypes"] = frozenset(ast.literal_eval(node.value))
            if isinstance(node, ast.FunctionDef) and node.name == "get_supported_head_sizes":
                stated["heads"] = frozenset(ast.literal_eval(node.body[-1].value))  # type: ignore[attr-defined]
        except ValueError:
            continue  # built from names of its module
    return stated
