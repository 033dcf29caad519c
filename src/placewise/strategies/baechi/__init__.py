"""Baechi's three placers: m-TOPO, m-ETF and m-SCT."""
