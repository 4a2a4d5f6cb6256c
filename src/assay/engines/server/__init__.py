"""The client of OpenAI-compatible servers.

`http` sends requests within limits, `bodies` builds them, `whole_reply` and `stream_reply` read the
answers, `kind` and `probing` find out what a server is and can do, `prompt_scores` and `top_tokens`
ask for log-probabilities, and `engine` offers all of this as an engine.
"""

from assay.engines.server.engine import ServerEngine, default_limits
from assay.engines.server.http import Limits
from assay.engines.server.metrics import Metrics, parse_metrics

__all__ = ["Limits", "Metrics", "ServerEngine", "default_limits", "parse_metrics"]
