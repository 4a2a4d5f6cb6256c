"""llama.cpp in this process: `gguf:FILE`."""
