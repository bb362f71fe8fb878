"""Where the rows of one plane lie: memory that grows, or a mapped prefix with a growing tail."""
