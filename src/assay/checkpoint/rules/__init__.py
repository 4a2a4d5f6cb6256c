"""Rules on a checkpoint's small files: config, tokenizer and chat template."""
