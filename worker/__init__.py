"""One process per loaded model, and the text worker. The only package that imports MLX."""
