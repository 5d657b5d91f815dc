"""neuronx-distributed's layouts: its files read, and written."""
