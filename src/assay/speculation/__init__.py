"""Does drafting pay? Reads what an engine leaves behind, normalises it, and judges the draft head.

`sources` opens it, `scan` and the `parsers` find figures, `read` makes one `record` of them;
`health` and `benefit` judge, `findings` say what is wrong; `live` asks a server that runs; `spec`
is the verb.
"""
