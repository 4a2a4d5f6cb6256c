"""The client of OpenAI-compatible servers."""

from assay.engines.server.discovery import Metrics, parse_metrics
from assay.engines.server.engine import ServerEngine, default_limits
from assay.engines.server.http import Limits

__all__ = ["Limits", "Metrics", "ServerEngine", "default_limits", "parse_metrics"]
