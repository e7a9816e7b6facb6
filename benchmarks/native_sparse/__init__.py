"""Where the time of Native Sparse Attention goes: each kernel by itself, with other tiles and launches than a call takes."""
