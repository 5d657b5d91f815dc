"""Text, tables and HTML for terminals, web pages and notebooks."""
