"""Export what was trained as a Hugging Face folder, and chat with it."""
