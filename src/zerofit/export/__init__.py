"""Leave with a Hugging Face folder."""
