"""Where resident state lives: host memory behind numpy, or GPU memory behind cupy."""
