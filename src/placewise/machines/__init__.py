"""Machines as clusters: presets by name, this machine as detected, devices cut into slices."""
