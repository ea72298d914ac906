"""Several processes that train one model: who is who, and what they agree on."""
