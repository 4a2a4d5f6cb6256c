"""The deployment keeps its contract. Needs `pip install llm-assay`; `pytest --assay-server URL`
names another server.
"""

import pytest


@pytest.mark.assay_gate("assay.toml")
def test_the_deployment_keeps_its_contract():
    """The gate has passed if this runs."""


def test_no_tool_call_is_worse_under_load(assay_gate):
    report = assay_gate("assay.toml").to_json()
    tools = next(part for part in report["results"]["parts"] if part["name"] == "tools")
    alone, *loaded = sorted(tools["results"]["tools"], key=lambda level: level["concurrency"])
    assert all(level["right"] >= alone["right"] - 2 for level in loaded)
