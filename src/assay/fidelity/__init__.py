"""Is the candidate distribution the reference's, within a declared margin?

`plan` says what is compared, on which `text` and at which `cost`; `reference` and `score` give the
rows of both sides, `store` and `pack` keep them; `metrics` are functions of two rows; `result`,
`margins` and `breakdown` say what they mean; `compare` is the verb.
"""
