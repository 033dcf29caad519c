"""The independent checker of certificates; it shares no code with what finds them."""
