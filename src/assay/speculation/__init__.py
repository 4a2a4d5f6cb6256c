"""Does drafting pay? Read an engine's logs and metrics, normalise them, and judge the draft head.

`sources` opens them, `search` and the `parsers` find figures, `read` makes one `record` of them;
`health` and `benefit` judge, `findings` say what is wrong; `live` asks a server that runs; `spec`
is the verb.
"""
