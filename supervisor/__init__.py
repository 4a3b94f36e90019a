"""Parent of everything: which models exist, which run, who uses them, how much memory they may have. No MLX, no HTTP."""
