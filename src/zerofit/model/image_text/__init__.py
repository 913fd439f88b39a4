"""Train the language model in an image-text checkpoint, without changing its towers."""
