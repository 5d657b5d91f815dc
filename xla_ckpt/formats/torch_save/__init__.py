"""Files of `torch.save`: zips of storages with a pickle that is read without running it, and single-file
checkpoints.
"""
