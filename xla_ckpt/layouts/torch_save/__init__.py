"""Files of `torch.save`: zips of storages, and pickles that are read without running them."""
