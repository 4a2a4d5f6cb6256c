"""Intervals and tests that the verdicts rest on; the errors of means come from clusters of
windows.
"""

from assay.stats.bootstrap import Resampling, bootstrap_quantiles, resampled_counts
from assay.stats.cluster import (
    ClusterEstimate,
    cluster_mean,
    cluster_proportion,
    cluster_ratio,
    mean_interval,
    not_negative,
    student_t,
)
from assay.stats.interval import Interval, check_confidence, interval_json, percent_change
from assay.stats.proportion import newcombe, wilson

__all__ = [
    "ClusterEstimate",
    "Interval",
    "Resampling",
    "bootstrap_quantiles",
    "check_confidence",
    "cluster_mean",
    "cluster_proportion",
    "cluster_ratio",
    "interval_json",
    "mean_interval",
    "newcombe",
    "not_negative",
    "percent_change",
    "resampled_counts",
    "student_t",
    "wilson",
]
