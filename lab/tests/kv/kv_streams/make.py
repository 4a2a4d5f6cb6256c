"""The golden streams, by the code of version 0.1.0: PYTHONPATH=SRC_OF_BA7355E python make.py
FOLDER.
"""

import sys
from pathlib import Path

import numpy as np
import torch
from assay.kv.codec import Samples, Site
from assay.kv.spec import parse_recipe

HERE, OUT = Path(__file__).parent, Path(sys.argv[1])
SITE = Site("k", 1, 4, 2, 24)
SPECS = {
    "pca_range": "sinks+pca(bits=2.5, classes=2)",
    "pca_trellis": "pca(bits=2, classes=2, trellis=8)",
    "pca_fixed": "mean+pca(bits=2.5, coding=fixed)",
    "kakeya": "kakeya(block=16, k=4, outlier=2)",
    "kakeya_shared": (
        "kakeya(block=16, k=4, basis=shared, levels=calibrated, pca=random, bits=4, skeleton=fp32)"
    ),
    "qprecond": "prerope+mean+qprecond+hadamard(bits=3)",
    "hadamard_wide": "recent(n=3)+hadamard(bits=9.25, norm=error)",
    "lattice_e8": "lattice",
    "fp8_head": "fp8(scale=head)",
    "noise": "noise(sigma=0.1)",
}
PLAIN = {
    "bf16": "bf16",
    "fp8": "fp8",
    "int": "int(bits=3, group=8, residual=2)",
    "hadamard": "sinks(n=2)+hadamard(bits=3.5)",
    "lattice": "lattice(lattice=D4, q=4)",
    "outliers": "outliers+mean(of=block)+hadamard(bits=2)",
}


def tokens(count, seed):
    drawn, fixed = (
        torch.Generator().manual_seed(1000 * seed + 48),
        torch.Generator().manual_seed(48),
    )
    spread = torch.exp(0.5 * torch.randn(48, generator=fixed))
    mean, mixing = torch.randn(48, generator=fixed), torch.randn(48, 8, generator=fixed) / 3
    x = torch.randn(count, 48, generator=drawn) * spread + mean
    x = x + torch.randn(count, 8, generator=drawn) @ mixing.T
    return x.reshape(count, 2, 24).transpose(0, 1).contiguous()


torch.set_num_threads(1)
root = torch.randn(2, 24, 24, generator=torch.Generator().manual_seed(5))
metric = root @ root.transpose(1, 2) / 24 + 0.1 * torch.eye(24)
samples = Samples(SITE, tokens(400, 9), torch.arange(400) % 200, metric)
for name, spec in SPECS.items():
    codec = parse_recipe(spec).fit(samples)
    stream = codec.encode(tokens(40, 1))
    np.savez_compressed(
        OUT / f"{name}.npz",
        spec=np.array(spec),
        stream=np.frombuffer(stream, np.uint8),
        decoded=codec.decode(stream).numpy(),
        **{f"table.{key}": table for key, table in codec.tables.items()},
    )
decoded = {}
for name, spec in PLAIN.items():
    codec = parse_recipe(spec).fit(Samples(Site("k", 1, 4, 3, 64)))
    decoded[name] = codec.decode((HERE / f"{name}.akvs").read_bytes()).numpy()
np.savez_compressed(OUT / "decoded.npz", **decoded)
