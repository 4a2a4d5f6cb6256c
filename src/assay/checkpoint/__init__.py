"""Is the checkpoint whole, and configured as its tensors are?"""
