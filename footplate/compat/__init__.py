"""What people have already written, run as it stands: Lightning's modules and callbacks, Petastorm's readers."""
