"""What an exported folder's Python files are made of, beside the sources of the models: written for `transformers`."""
