"""Published sizes of Hugging Face models."""
