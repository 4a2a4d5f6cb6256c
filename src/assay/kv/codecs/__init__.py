"""KV codecs and the wrappers around them, one file each; `assay.kv.registry` names them."""
