"""List scheduling: HEFT, CPoP and Mayer's critical path."""
