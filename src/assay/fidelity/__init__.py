"""Is the candidate distribution the reference's, within a declared margin?

`plan` says what is compared, on which `text`; `reference` and `score` give the rows of both sides,
`store` and `pack` keep them; `metrics` are functions of two rows; `assess`, `margin_tests` and
`breakdown` judge them; `compare` is the verb.
"""
