"""The network bench: tiles, ring and Transformer Engine's ring over rate-limited links between network namespaces."""
