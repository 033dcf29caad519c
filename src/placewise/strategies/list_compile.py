"""How the list schedulers' inner kernels are compiled."""
