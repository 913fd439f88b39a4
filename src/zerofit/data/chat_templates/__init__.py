"""Built-in chat templates for training, and the arguments of templates."""
