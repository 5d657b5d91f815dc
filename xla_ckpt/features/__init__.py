"""Optional features of saves and loads."""
