"""Salads: text whose characters, words or word order no language would produce. Tables, measures, and the detector."""
