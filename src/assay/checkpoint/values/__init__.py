"""Every stored value: statistics of each tensor, and what they say."""
