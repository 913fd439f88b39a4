"""Export trained models as Hugging Face folders."""
