"""KV-cache codecs: real streams, real bytes, and scores that read the cache."""
