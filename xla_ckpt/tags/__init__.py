"""Tag directories: names, order, retention, commit."""
