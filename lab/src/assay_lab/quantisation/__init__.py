"""Scalar quantisation: levels, packed integers, the rotation before them, and weights rounded by
it.
"""

from assay_lab.quantisation.gptq import gptq, gptq_model
from assay_lab.quantisation.hadamard import Rotation
from assay_lab.quantisation.integers import quantise_model
from assay_lab.quantisation.levels import empirical_levels, gaussian_levels
from assay_lab.quantisation.nearest import nearest_level
from assay_lab.quantisation.packing import pack, unpack
from assay_lab.quantisation.polar import polar_quantise

__all__ = [
    "Rotation",
    "empirical_levels",
    "gaussian_levels",
    "gptq",
    "gptq_model",
    "nearest_level",
    "pack",
    "polar_quantise",
    "quantise_model",
    "unpack",
]
