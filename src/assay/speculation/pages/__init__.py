"""Figures of speculation on any page that a person would read: tables, bullets, JSON, prose."""

from assay.speculation.pages.reader import Page, read_json_page, read_page

__all__ = ["Page", "read_json_page", "read_page"]
