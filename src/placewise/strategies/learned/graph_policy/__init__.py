"""A policy that carries over: a network that has learned on many graphs and machines to place blocks one after another."""
