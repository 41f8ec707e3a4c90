"""Images of 32 x 32 pixels as sequences of 3,072 tokens."""
