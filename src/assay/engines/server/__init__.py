"""The client of OpenAI-compatible servers.

`http` carries with limits, `messages` are requests and answers, `discovery` finds out what a server
is and can do, `scoring` has the routes to log-probabilities, and `engine` offers it all as an
engine.
"""

from assay.engines.server.engine import ServerEngine, default_limits
from assay.engines.server.http import Limits
from assay.engines.server.metrics import Metrics, parse_metrics

__all__ = ["Limits", "Metrics", "ServerEngine", "default_limits", "parse_metrics"]
