"""Writers that draw a `Report`: console, HTML, JUnit, Markdown, Prometheus. They know the verdict
vocabulary only.
"""
