"""The Hub, through huggingface_hub: what a revision holds, the digests of its files, headers by range requests."""
