"""A published capture as the reference: written here from the text of its format, read, compared
with, and altered.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import save_file
from test_store import head, window

from assay.cli.main import invoke
from assay.engines.scoring import Head
from assay.errors import AssayError
from assay.fidelity.capture import NAME
from assay.fidelity.pack.reader import open_pack, pack_settings

LENGTH, WIDTH, VOCAB = 12, 16, 50


def sha(raw: bytes | str) -> str:
    return hashlib.sha256(raw.encode() if isinstance(raw, str) else raw).hexdigest()


def tensor_sha(tensor: torch.Tensor) -> str:
    return sha(tensor.contiguous().view(torch.uint16).numpy().tobytes())


def put(path: Path, value: Any, seal: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if seal:
        value = value | {seal: ""}
        value[seal] = sha(
            json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        )
    path.write_text(json.dumps(value))


def capture(
    folder: Path,
    tokens: list[list[int]],
    states: list[torch.Tensor],
    weight: torch.Tensor,
    *,
    with_head: bool = True,
    **changed: Any,
) -> Path:
    """A capture in the layout of sections 2, 5, 6, 7 and 8 of the format; `changed` replaces keys
    of its capture manifest.
    """
    for name in ("panel/tokens", "capture", "head", "runtime"):
        (folder / name).mkdir(parents=True)
    panel, records = [], []
    for i, (ids, rows) in enumerate(zip(tokens, states, strict=True)):
        put(folder / f"panel/tokens/context-{i:04d}.json", ids)
        digest = sha(json.dumps(ids, separators=(",", ":")))
        panel.append(
            {
                "index": i,
                "token_file": f"tokens/context-{i:04d}.json",
                "token_ids_json_sha256": digest,
                "prediction_positions": len(ids) - 1,
            }
        )
        save_file({"hidden_states": rows}, folder / f"capture/hidden_{i:04d}.safetensors")
        records.append(
            {
                "index": i,
                "file": f"hidden_{i:04d}.safetensors",
                "key": "hidden_states",
                "tensor_content_sha256": tensor_sha(rows),
                "token_ids_json_sha256": digest,
                "scored_rows": len(rows),
                "shape": list(rows.shape),
            }
        )
    suite = sha("\n".join(r["token_ids_json_sha256"] for r in panel))
    put(
        folder / "panel/panel.json",
        {
            "schema": "malaiwah.fidelity-panel-binding.v1",
            "panel_id": "panel--test",
            "contexts": len(panel),
            "records": panel,
            "scoring_window": {"score_from": 0, "windowed": False},
            "suite_token_hash_sha256": suite,
        },
        "receipt_sha256",
    )
    content = sha("\n".join(f"{r['index']}:{r['tensor_content_sha256']}" for r in records))
    form = {
        "form": "hidden",
        "semantic_point": "after_final_rmsnorm_before_lm_head",
        "dtype": "BF16",
        "tensor_key": "hidden_states",
    }
    put(
        folder / "capture/manifest.json",
        form | {"records": records, "capture_content_digest": content} | changed,
        "receipt_sha256",
    )
    if with_head:
        save_file({"lm_head.weight": weight}, folder / "head/weight.safetensors")
    put(folder / "runtime/capture-runtime.json", {"lane": "test"})
    (folder / "README.md").write_text("a capture")
    seal(
        folder,
        {
            "schema": "malaiwah.fidelity-dataset.v1",
            "format_version": 1,
            "dataset": {"role": "root"},
            "capture": {"capture_content_digest": content},
            "panel": {"suite_token_hash_sha256": suite},
            "weights": {"repository": "org/model", "revision": "abc"},
            "head": {
                "present": with_head,
                "file": "weight.safetensors",
                "tensor_key": "lm_head.weight",
                "shape": list(weight.shape),
                "dtype": "BF16",
                "tensor_content_sha256": tensor_sha(weight),
            },
        },
    )
    return folder


def seal(folder: Path, manifest: dict[str, Any]) -> None:
    files = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())
    lines = [
        f"{sha((folder / f).read_bytes())}  {f}" for f in files if f not in (NAME, "checksums.txt")
    ]
    (folder / "checksums.txt").write_text("\n".join(lines) + "\n")
    sealed = {"checksums_sha256": sha((folder / "checksums.txt").read_bytes())}
    put(folder / NAME, manifest | {"seal": sealed}, "dataset_sha256")


@pytest.fixture
def made(tmp_path: Path) -> Any:
    tokens = [list(window(i).tokens) for i in range(3)]
    states = [
        torch.randn(LENGTH - 1, WIDTH, generator=torch.Generator().manual_seed(i)).bfloat16()
        for i in range(3)
    ]
    weight = head(dtype=torch.bfloat16).weight
    return lambda **more: (
        capture(tmp_path / "root", tokens, states, weight, **more),
        states,
        weight,
    )


def test_a_capture_is_read_with_its_head(made: Any) -> None:
    folder, states, weight = made()
    pack = open_pack(f"pack:{folder}")
    assert pack.windows == tuple(window(i) for i in range(3)) and pack.header.scored_from == 1
    assert pack_settings(f"pack:{folder}")["length"] == LENGTH
    for i, rows in enumerate(pack.rows(pack.windows)):
        assert torch.equal(rows.states, states[i])
        assert torch.allclose(rows.logits(0, 11), (states[i] @ weight.T).float(), atol=0.05)


def test_a_capture_without_its_head_takes_the_candidates_own(made: Any, tmp_path: Path) -> None:
    from types import SimpleNamespace

    folder, _, weight = made(with_head=False)
    pack = open_pack(f"pack:{folder}")
    assert pack.head is None
    with pytest.raises(AssayError, match="does not have the reference's"):
        pack.find_head(SimpleNamespace(head=Head(weight + 1, None)))
    pack.find_head(SimpleNamespace(head=Head(weight.float(), None)))
    assert pack.head is not None and torch.equal(pack.head.weight, weight)
    (tmp_path / "model").mkdir()
    save_file({"lm_head.weight": weight}, tmp_path / "model" / "model.safetensors")
    assert open_pack(f"pack:{folder}?head={tmp_path / 'model'}").head is not None


@pytest.mark.parametrize(
    "name",
    [
        "capture/hidden_0001.safetensors",
        "panel/tokens/context-0002.json",
        "head/weight.safetensors",
        "README.md",
        NAME,
        "checksums.txt",
    ],
)
def test_every_altered_file_is_noticed(made: Any, name: str) -> None:
    folder, *_ = made()
    raw = bytearray((folder / name).read_bytes())
    raw[-9] ^= 1
    (folder / name).write_bytes(bytes(raw))
    with pytest.raises(AssayError, match="the capture root "):
        open_pack(f"pack:{folder}")


def test_who_seals_anew_still_has_to_keep_states_tokens_and_head(made: Any) -> None:
    folder, _, weight = made()
    manifest = json.loads((folder / NAME).read_text())
    save_file({"lm_head.weight": weight * 2}, folder / "head/weight.safetensors")
    seal(folder, manifest)
    with pytest.raises(AssayError, match=r"another tensor in head/weight.safetensors"):
        open_pack(f"pack:{folder}")
    (folder / "extra").write_text("x")
    with pytest.raises(AssayError, match=r"holds extra, which is not in checksums.txt"):
        open_pack(f"pack:{folder}")
    (folder / "extra").unlink()
    (folder / "panel/tokens/context-0000.json").unlink()
    with pytest.raises(AssayError, match="lacks panel/tokens/context-0000"):
        open_pack(f"pack:{folder}")


@pytest.mark.parametrize(
    "changed", [{"form": "logit"}, {"semantic_point": "lm_head_output_before_sampling"}]
)
def test_what_is_not_captured_before_the_head_is_refused(
    made: Any, changed: dict[str, str]
) -> None:
    folder, *_ = made(**changed)
    with pytest.raises(AssayError, match="only states after_final"):
        open_pack(f"pack:{folder}")


def test_a_path_out_of_the_folder_is_refused(made: Any, tmp_path: Path) -> None:
    folder, *_ = made()
    manifest = json.loads((folder / NAME).read_text())
    (tmp_path / "secret").write_text("x")
    text = (folder / "checksums.txt").read_text() + f"{sha(b'x')}  ../secret\n"
    (folder / "checksums.txt").write_text(text)
    put(folder / NAME, manifest | {"seal": {"checksums_sha256": sha(text)}}, "dataset_sha256")
    with pytest.raises(AssayError, match="a file outside of it"):
        open_pack(f"pack:{folder}")


def test_the_command_line_says_it_in_one_line(
    made: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder, *_ = made()
    monkeypatch.setenv("ASSAY_CACHE", str(tmp_path / "cache"))
    assert invoke(["reference", "pack", str(folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["results"]
    assert found["windows"] == 3 and found["head"]["included"] and not found["signed"]
    (folder / "extra").write_text("x")
    assert invoke(["compare", f"pack:{folder}", "hf:.", "--json"]) == 2
    title = json.loads(capsys.readouterr().out)["findings"][0]["title"]
    assert "not in checksums.txt" in title and "\n" not in title
