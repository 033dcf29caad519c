"""The papers' tables next to ours: what they reported, and what our implementations reach on simulated machines."""
