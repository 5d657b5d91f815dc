"""What layouts have in common whose files hold the state of one rank each, with the tensors that it has in memory."""
