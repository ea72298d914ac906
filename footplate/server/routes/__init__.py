"""What can be asked: a file for each kind of thing."""
