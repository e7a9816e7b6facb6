"""Times each kernel of Native Sparse Attention by itself, also with other tiles and launches than a call takes."""
