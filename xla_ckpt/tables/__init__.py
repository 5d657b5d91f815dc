"""What is said of tags, saves and comparisons, as text and tables: for terminals, pages and notebooks. Pure."""
