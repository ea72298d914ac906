"""How a trainer goes about its work: what it is made of, its loops, what it reports, and how it ends."""
