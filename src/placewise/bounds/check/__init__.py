"""The independent checker of certificates; it shares no code with the files that find the bounds."""
