"""The step as one program: captured as a graph, lowered to JAX, run on all devices."""
