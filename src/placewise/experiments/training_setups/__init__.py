"""Training setups as people have them, trained by placewise and by a plain eager loop, and compared."""
