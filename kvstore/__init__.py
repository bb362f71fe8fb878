"""The cache library: what an inference process embeds."""
