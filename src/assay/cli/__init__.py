"""The command line: the verbs, a function each, over options that the verbs' dataclasses declare
once.
"""
