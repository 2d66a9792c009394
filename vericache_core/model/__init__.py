"""Running a Hugging Face causal LM one fixed-shape step at a time."""
