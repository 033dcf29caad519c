"""The papers' tables beside ours: what was reported, what our implementations reach on models of the same machines."""
