"""Train the language model inside an image-text checkpoint, whose towers stay as they are."""
