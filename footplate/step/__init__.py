"""The training step as a program: what happens between a batch and the next one, for each kind of hardware."""
