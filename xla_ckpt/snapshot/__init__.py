"""A state, frozen in host memory."""
