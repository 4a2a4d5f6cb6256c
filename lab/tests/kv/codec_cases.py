"""Sites, tensors and SPECs that every codec is tried on."""

from __future__ import annotations

from functools import cache

import torch

from assay_lab.kv.codecs.samples import LayerStream, Samples
from assay_lab.kv.spec import parse_recipe
from assay_lab.kv.stream_coder import FittedCodec

# Small tensors: threads would only wait for each other.
torch.set_num_threads(1)

SPECS = {
    # SPEC: largest relative error ‖x − x̂‖ / ‖x‖ on Gaussian values that its bits allow
    "identity": 0.0,
    "bf16": 0.003,
    "fp8": 0.04,
    "fp8(format=e5m2)": 0.08,
    "fp8(scale=tensor)": 0.04,
    "fp8(scale=head)": 0.04,
    "fp8(scale=head, top=200)": 0.04,
    "int": 0.12,
    "int(bits=8, group=16, residual=0)": 0.008,
    "int(bits=2, axis=token, residual=5)": 0.55,
    "hadamard": 0.11,
    "hadamard(bits=2.5)": 0.29,
    "hadamard(bits=8, norm=error)": 0.01,
    "hadamard(bits=9.25, norm=projection)": 0.006,
    "hadamard(bits=10)": 0.004,
    "sinks+recent(n=3)+hadamard(bits=1)": 0.75,
    "mean+hadamard": 0.09,
    "mean(of=block)+int(bits=3, residual=0)": 0.24,
    "prerope+mean+sinks+qprecond+hadamard(bits=5)": 0.12,
    "outliers(n=2)+mean+outliers+hadamard(bits=3)": 0.16,
    "pca": 0.2,
    "pca(bits=6, classes=1, rdo=0)": 0.03,
    "sinks+pca(bits=1.5)": 0.45,
    "pca(step=0.2, classes=2)": 0.2,
    "pca(trellis=8)": 0.17,
    "sinks+pca(bits=1.5, rdo=0, classes=1, trellis=32)": 0.45,
    "pca(bits=4, coding=fixed)": 0.15,
    "mean+sinks+pca(bits=2.5, coding=fixed)": 0.35,
    "pca(bits=4, coding=fixed, gains=1)": 0.15,
    "mean+sinks+pca(bits=2.5, coding=fixed, gains=3)": 0.35,
    "lattice": 0.09,
    "lattice(lattice=D4, q=38)": 0.03,
    "lattice(lattice=D4, q=2)": 0.47,
    "kakeya(block=128)": 0.2,
    "kakeya(block=128, bits=4, pca=random, outlier=2)": 0.6,
    "kakeya(block=128, bits=2, variance=0.95, levels=calibrated, skeleton=fp32)": 0.36,
    "kakeya(block=128, k=4, basis=shared, published_norm=true)": 1.0,
    "qprecond+kakeya(block=100, bits=4)": 0.2,
    "noise(sigma=0.1)": 0.11,
}
SITES = {
    "k64": LayerStream("k", 1, 4, 3, 64),
    "v64": LayerStream("v", 1, 4, 3, 64),
    "k80": LayerStream("k", 1, 4, 2, 80),
    "v1x256": LayerStream("v", 1, 4, 1, 256),
    "k24": LayerStream("k", 1, 4, 2, 24),
}


def tokens(site: LayerStream, count: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    """Channels of different spread and mean, correlated over heads, as keys are: [heads, count,
    head_dim].
    """
    generator = torch.Generator().manual_seed(1000 * seed + site.width)
    fixed = torch.Generator().manual_seed(site.width)
    spread = torch.exp(0.5 * torch.randn(site.width, generator=fixed))
    mean = torch.randn(site.width, generator=fixed)
    mixing = torch.randn(site.width, 8, generator=fixed) / 3
    x = torch.randn(count, site.width, generator=generator) * spread + mean
    x = x + torch.randn(count, 8, generator=generator) @ mixing.T
    return scale * x.reshape(count, site.heads, site.head_dim).transpose(0, 1).contiguous()


def metric(site: LayerStream) -> torch.Tensor:
    """Second moments of made-up queries [heads, head_dim, head_dim]."""
    generator = torch.Generator().manual_seed(5)
    root = torch.randn(site.heads, site.head_dim, site.head_dim, generator=generator)
    return root @ root.transpose(1, 2) / site.head_dim + 0.1 * torch.eye(site.head_dim)


def samples(site: LayerStream, count: int = 700) -> Samples:
    """A calibration of one site."""
    positions = torch.arange(count) % 350
    return Samples(site, tokens(site, count, seed=9), positions, metric(site))


@cache
def fitted(spec: str, site_name: str) -> FittedCodec:
    """A SPEC fitted to a site."""
    return parse_recipe(spec).fit(samples(SITES[site_name]))
