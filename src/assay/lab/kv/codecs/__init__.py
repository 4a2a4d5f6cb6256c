"""KV codecs and the wrappers around them, one file each; `assay.lab.kv.spec` names them."""
