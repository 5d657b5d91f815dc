"""Storage backends, background threads, and state of this process."""
