"""Systems side by side on the same prompts: how many tokens a second, and are they the same tokens."""
