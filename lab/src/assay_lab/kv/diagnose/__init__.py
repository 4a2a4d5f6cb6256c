"""What a codec loses, stage by stage and layer by layer."""
