"""Save to local disks first, and upload to an object store in the background (`SaveOptions.local`)."""
